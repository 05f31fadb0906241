// See README.md.
#pragma once

namespace gloo::transport {
class Device;
class UnboundBuffer {
public:
  virtual ~UnboundBuffer() = 0;
};
} // namespace gloo::transport
