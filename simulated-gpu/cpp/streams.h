// The calling thread's current device and streams.
#pragma once
#include "order.h"
#include <c10/core/Stream.h>

namespace simulated {

int current_device();
void set_current_device(int device);
StreamNumber current_stream(int device);
StreamNumber number_of(const c10::Stream &stream);

} // namespace simulated
