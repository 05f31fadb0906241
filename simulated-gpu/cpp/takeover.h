// What happens while the library is loaded.
#pragma once

namespace simulated {

// Warnings are shown again.
void end_silence();

} // namespace simulated
