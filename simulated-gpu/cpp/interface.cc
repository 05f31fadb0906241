// What a program may ask of the simulator itself, by dlsym.
#include "order.h"
#include "settings.h"
#include <cstdio>
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) void
gpipe_simulated_counts(simulated::Counts *counts) {
  simulated::Lock lock(simulated::mutex());
  *counts = simulated::counts();
}

namespace simulated {

namespace {

const bool is_logged = [] {
  if (settings().devices > 0 && !settings().log.empty())
    std::atexit([] {
      std::FILE *file = std::fopen(settings().log.c_str(), "a");
      if (file == nullptr)
        return;
      const Counts &all = counts();
      std::fprintf(file, "%llu kernels, %llu allocations, %llu host waits\n",
                   static_cast<unsigned long long>(all.launches),
                   static_cast<unsigned long long>(all.allocations),
                   static_cast<unsigned long long>(all.host_waits));
      std::fclose(file);
    });
  return true;
}();

} // namespace

} // namespace simulated
