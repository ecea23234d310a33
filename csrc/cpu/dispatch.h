// Which instruction set's kernels to run: the best that this machine has, or one chosen by name.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Names of the sets that are compiled in and that this machine can run, best first.
std::vector<std::string> available_isas();
// The table in use.
const KernelTable& kernels();
// Throws std::invalid_argument, naming those available, for an unknown or unsupported set.
void set_isa(const std::string& name);

}  // namespace octavo
