// Chooses the instruction set whose kernels run: the best that this machine has, or one chosen by name.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Returns the names of the sets that are compiled in and that this machine can run, best first.
std::vector<std::string> available_isas();
// Returns the table in use.
const KernelTable& kernels();
// Chooses a set by name. Throws std::invalid_argument, with the available names, if it is unknown or cannot run.
void set_isa(const std::string& name);

}  // namespace octavo
