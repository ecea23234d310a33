// The pool that runs kernel tasks. It does not know what they compute. Launches run one after another; the tasks of
// each run on all threads, the calling one included. One pool serves the process; callers take turns. How many threads,
// and where: topology.cpp.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "launch.h"

namespace octavo {

// How many threads to use (0: not decided yet), and the processors that they stay on: none (anywhere), one for each
// thread, or a set that all share.
struct Placement {
    int threads = 0;
    std::vector<int> cpus;
};
using CoresByNode = std::map<int, std::vector<int>>;  // NUMA node -> a processor of each of its cores
// Returns the placement of a process that may use these cores for `quota` seconds of processor time a second.
Placement place_threads(const CoresByNode& nodes, double quota);
// Returns the physical cores that this process may use: those in its affinity mask, limited by the CPU quota of its
// cgroup.
Placement default_placement();
// Returns the NUMA node of a processor; 0 if the system has no nodes.
int numa_node(int cpu);
// Returns the thread whose share `thread` takes from after those of `step` - 1 others (step: 1 to size - 1). Threads of
// its own node, whose memory is near, come first. nodes[i] is the node of thread i, whose neighbours in number are
// those of its node; nothing if there is one node.
int victim(const std::vector<int>& nodes, int size, int thread, int step);
// Asks the system to provide the whole pages of this memory, when they are first written, on the nodes of the threads
// (nodes[i]: that of thread i). In shares: the first part of the memory on the node of the first threads, and so on, as
// the pool shares out tasks. Else the pages take turns. Returns false if the system refuses or cannot do it.
bool place_pages(void* memory, size_t bytes, size_t page_bytes, const std::vector<int>& nodes, bool in_shares);
// Keeps the calling thread on these processors. Returns false if the system refuses or cannot do it.
bool bind_thread(const std::vector<int>& cpus);

int num_threads();
// Returns the NUMA node of each thread; nothing if the threads are not bound to one processor each, or all to one node.
std::vector<int> nodes_of_threads();
// Sets the number of threads that a call may use, the calling one included, and their processors: none (anywhere), one
// for each thread, or a set that all share. Waits for a running call to end. Throws std::invalid_argument for a number
// of threads that is too small or too large.
void set_threads(int n, const std::vector<int>& cpus);

// Runs `count` launches. Each begins when all tasks of the launch before it have ended. Returns when the last has.
void run(const Launch* launches, size_t count);
inline void run(const Launch& launch) { run(&launch, 1); }

}  // namespace octavo
