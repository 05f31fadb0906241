// What the environment asks of the simulated GPUs. Read once, when the library is loaded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace simulated {

// The kinds of waits that a program can ask for.
enum class Wait { EventBlock, EventSynchronize, StreamSynchronize, RecordStream };

struct Settings {
  int devices = 0;                    // GPIPE_SIMULATED_GPUS
  std::size_t memory = 0;             // GPIPE_SIMULATED_GPU_MEMORY: bytes of each, such as 8GiB
  std::string log;                    // GPIPE_SIMULATED_GPU_LOG: gets a line at the process's end
  std::string ignored;                // GPIPE_SIMULATED_GPU_IGNORES: one kind of wait, for tests
  // GPIPE_SIMULATED_GPU_HANGS, such as 1:500, for tests: kernels of device 1 from the 500th on never
  // end, nor does what waits for them. Without it no device hangs.
  int hanging = -1;
  uint64_t hangs_at = 0;

  // Whether the program's waits of this kind are ignored, as if it had not asked for them.
  bool ignores(Wait wait) const;
};

const Settings &settings();

} // namespace simulated
