// The graph of a forward whose saved tensors are computed again (hollow.cc).
#pragma once
#include <cstddef>

namespace gpipe {

// Whether this thread fills a hollow graph that is full once `count` more tensors are saved.
bool ends_with(std::size_t count);

} // namespace gpipe
