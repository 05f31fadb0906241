// Linked first: PyTorch would warn of each of its kernels that this library replaces. takeover.cc,
// which is linked last, ends the silence.
#include "takeover.h"
#include <c10/util/Exception.h>

namespace simulated {

namespace {

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

c10::WarningHandler *const before = [] {
  static auto *silence = new Silence;
  c10::WarningHandler *own = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(silence);
  return own;
}();

} // namespace

void end_silence() { c10::WarningUtils::set_warning_handler(before); }

} // namespace simulated
