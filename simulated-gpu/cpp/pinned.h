// Pinned memory of the host, which GPUs copy to and from while the host goes on.
#pragma once
#include "order.h"
#include <c10/core/Allocator.h>

namespace simulated {

c10::Allocator *pinned_allocator();
bool is_pinned(const void *address);

// A copy to or from pinned memory: makes it accessible for the copy itself. With `in_background`
// the host cannot read what is copied to it, nor change what is copied from it, until it has waited
// for the copy; an access before is a fault.
class PinnedCopy {
public:
  enum class Direction { ToHost, FromHost };
  PinnedCopy(const void *address, StreamNumber stream, Direction direction);
  // Call it after the copy's launch.
  void done(bool in_background);

private:
  void *address; // of the allocation; null: not pinned
  StreamNumber stream;
  Direction direction;
};

// Makes memory accessible whose copies the host waited for.
void release_pinned();
// The kind of the fault's address, or null if it is not pinned memory.
const char *pinned_fault(const void *address);

} // namespace simulated
