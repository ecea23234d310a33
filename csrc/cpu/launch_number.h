// The number of the launch that a kernel runs in. A thread that keeps something from one task of a launch to the next
// recognizes it by this number.
#pragma once

#include <cstdint>

namespace octavo {

// Returns the number of the launch that this thread's task belongs to. No two launches of the process have the same
// number; 0 is none. Valid while a task runs.
uint64_t launch_number();

}  // namespace octavo
