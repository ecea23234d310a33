// How many threads this process should use, and where: physical cores in its affinity mask, on one NUMA node, limited
// by the CPU quota of its control group (a container's --cpus). More threads than that only take turns, and spin at
// each other meanwhile. Threads of another node read weights and cache through the link between the nodes. Declared in
// thread_pool.h.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include "thread_pool.h"

namespace octavo {

namespace {

#ifdef __linux__

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Returns the NUMA node of a processor: its directory in sysfs has an entry named after the node. 0 if there are no
// nodes.
int numa_node(int cpu) {
    const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/node";
    for (int node = 0; node < 64; ++node) {
        if (access((directory + std::to_string(node)).c_str(), F_OK) == 0) return node;
    }
    return 0;
}

// Returns, by NUMA node, the first hardware thread of each physical core in this process's affinity mask.
std::map<int, std::vector<int>> cores_by_node() {
    std::map<int, std::vector<int>> nodes;
    constexpr int kCpus = 8192;
    cpu_set_t* mask = CPU_ALLOC(kCpus);
    if (mask == nullptr) return nodes;
    const size_t bytes = CPU_ALLOC_SIZE(kCpus);
    if (sched_getaffinity(0, bytes, mask) == 0) {
        std::set<std::string> seen;  // hardware threads of one core list the same siblings
        for (int cpu = 0; cpu < kCpus; ++cpu) {
            if (!CPU_ISSET_S(cpu, bytes, mask)) continue;
            const std::string name = std::to_string(cpu);
            const std::string siblings =
                first_line("/sys/devices/system/cpu/cpu" + name + "/topology/thread_siblings_list");
            if (seen.insert(siblings.empty() ? name : siblings).second) nodes[numa_node(cpu)].push_back(cpu);
        }
    }
    CPU_FREE(mask);
    return nodes;
}

double quota_v2(const std::string& path) {
    std::ifstream file(path + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return INFINITY;
    return std::atof(quota.c_str()) / period;
}

double quota_v1(const std::string& path) {
    std::ifstream quota_file(path + "/cpu.cfs_quota_us");
    std::ifstream period_file(path + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return INFINITY;
    return quota / period;
}

// Returns the least quota from this process's group up to the root. (In a container only the root is visible.)
template <class Quota>
double least_quota(const std::string& mount, std::string group, Quota quota) {
    double least = quota(mount);
    while (!group.empty() && group != "/") {
        least = std::min(least, quota(mount + group));
        group = group.substr(0, group.rfind('/'));
    }
    return least;
}

double cpu_quota() {
    double least = INFINITY;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string group = line.substr(second + 1);
        if (controllers.empty()) {
            least = std::min(least, least_quota("/sys/fs/cgroup", group, quota_v2));
        } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
            least = std::min(least, least_quota("/sys/fs/cgroup/cpu", group, quota_v1));
        }
    }
    return least;
}

#else

double cpu_quota() { return INFINITY; }

#endif

}  // namespace

Placement default_placement() {
    Placement placement;
#ifdef __linux__
    const std::map<int, std::vector<int>> nodes = cores_by_node();
    for (const auto& [node, cpus] : nodes) {
        if (cpus.size() > placement.cpus.size()) placement.cpus = cpus;
    }
    placement.threads = static_cast<int>(placement.cpus.size());
    // On one node the system's scheduler does well, and gives other programs their turn: threads are not bound.
    if (nodes.size() < 2) placement.cpus.clear();
#elif defined(__APPLE__)
    size_t size = sizeof(placement.threads);
    if (sysctlbyname("hw.physicalcpu", &placement.threads, &size, nullptr, 0) != 0) placement.threads = 0;
#endif
    if (placement.threads <= 0) placement.threads = static_cast<int>(std::thread::hardware_concurrency());
    const double quota = cpu_quota();
    if (quota < placement.threads) placement.threads = static_cast<int>(std::ceil(quota));
    placement.threads = std::max(placement.threads, 1);
    return placement;
}

bool bind_thread(const std::vector<int>& cpus) {
#ifdef __linux__
    if (cpus.empty()) return true;
    const int highest = *std::max_element(cpus.begin(), cpus.end());
    cpu_set_t* mask = CPU_ALLOC(highest + 1);
    if (mask == nullptr) return false;
    const size_t bytes = CPU_ALLOC_SIZE(highest + 1);
    CPU_ZERO_S(bytes, mask);
    for (const int cpu : cpus) CPU_SET_S(cpu, bytes, mask);
    const bool bound = sched_setaffinity(0, bytes, mask) == 0;
    CPU_FREE(mask);
    return bound;
#else
    return cpus.empty();
#endif
}

}  // namespace octavo
