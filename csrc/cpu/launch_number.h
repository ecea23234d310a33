// Which launch a kernel runs in, for what a thread keeps from one task of a launch to the next.
#pragma once

#include <cstdint>

namespace octavo {

// No two launches of the process have the same number; 0 is none. Good while a task runs.
uint64_t launch_number();

}  // namespace octavo
