// How many threads this process should use, and where: the physical cores in its affinity mask, limited by the CPU
// quota of its control group (a container's --cpus). More threads than that only take turns, and spin at each other
// meanwhile. On several NUMA nodes each thread of the pool stays on a core (the thread that calls is left to the
// system), and memory is placed where its readers are: a read from another node goes through the link between the
// nodes, which is slower than the node's own memory. Declared in thread_pool.h.
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
#include <sys/syscall.h>
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

constexpr int kMaxNodes = 64;  // bits of a node mask
// Modes of mbind (linux/mempolicy.h, which not every system has).
constexpr unsigned long kPreferred = 1, kInterleave = 3;

// Returns, by NUMA node, the first hardware thread of each physical core in this process's affinity mask.
CoresByNode cores_by_node() {
    CoresByNode nodes;
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

int numa_node(int cpu) {
#ifdef __linux__
    // A processor's directory in sysfs has an entry named after its node.
    const std::string directory = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/node";
    for (int node = 0; node < kMaxNodes; ++node) {
        if (access((directory + std::to_string(node)).c_str(), F_OK) == 0) return node;
    }
#endif
    (void)cpu;
    return 0;
}

Placement place_threads(const CoresByNode& nodes, double quota) {
    size_t num_cores = 0;
    const std::vector<int>* largest = nullptr;
    for (const auto& [node, cpus] : nodes) {
        num_cores += cpus.size();
        if (largest == nullptr || cpus.size() > largest->size()) largest = &cpus;
    }
    if (num_cores == 0) return {};
    const size_t threads =
        quota < static_cast<double>(num_cores) ? std::max<size_t>(1, static_cast<size_t>(std::ceil(quota))) : num_cores;
    // On one node the system's scheduler does well, and gives other programs their turn: threads are not bound.
    if (nodes.size() < 2) return {static_cast<int>(threads), {}};
    // A quota that one node can use up keeps to that node; the threads share its cores.
    if (threads <= largest->size()) return {static_cast<int>(threads), *largest};
    // Each node gives the same share of its cores. Threads of one node have neighbouring numbers.
    Placement placement{static_cast<int>(threads), {}};
    size_t before = 0;
    for (const auto& [node, cpus] : nodes) {
        const size_t begin = before * threads / num_cores, end = (before + cpus.size()) * threads / num_cores;
        placement.cpus.insert(placement.cpus.end(), cpus.begin(), cpus.begin() + static_cast<ptrdiff_t>(end - begin));
        before += cpus.size();
    }
    return placement;
}

Placement default_placement() {
    Placement placement;
#ifdef __linux__
    placement = place_threads(cores_by_node(), cpu_quota());
#elif defined(__APPLE__)
    size_t size = sizeof(placement.threads);
    if (sysctlbyname("hw.physicalcpu", &placement.threads, &size, nullptr, 0) != 0) placement.threads = 0;
#endif
    if (placement.threads > 0) return placement;
    const int threads = static_cast<int>(std::thread::hardware_concurrency());
    return {std::max(1, static_cast<int>(std::min(std::ceil(cpu_quota()), static_cast<double>(threads)))), {}};
}

int victim(const std::vector<int>& nodes, int size, int thread, int step) {
    int begin = 0, end = size;  // the threads at home
    if (!nodes.empty()) {
        const auto is_home = [&](int other) {
            return nodes[static_cast<size_t>(other)] == nodes[static_cast<size_t>(thread)];
        };
        for (begin = thread; begin > 0 && is_home(begin - 1);) --begin;
        for (end = thread + 1; end < size && is_home(end);) ++end;
    }
    const int at_home = end - begin;
    return step < at_home ? begin + (thread - begin + step) % at_home : (end + step - at_home) % size;
}

bool place_pages(void* memory, size_t bytes, size_t page_bytes, const std::vector<int>& nodes, bool in_shares) {
#ifdef __linux__
    const auto set_policy = [&](uintptr_t begin, uintptr_t end, unsigned long mode, uint64_t mask) {
        return begin >= end || syscall(SYS_mbind, begin, end - begin, mode, &mask, kMaxNodes + 1UL, 0UL) == 0;
    };
    // Only whole pages: what lies beside the memory belongs to others.
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = (address + page_bytes - 1) / page_bytes * page_bytes;
    const uintptr_t last = (address + bytes) / page_bytes * page_bytes;
    if (first >= last) return true;
    if (!in_shares) {
        uint64_t mask = 0;
        for (const int node : nodes) mask |= uint64_t{1} << node;
        return set_policy(first, last, kInterleave, mask);
    }
    const size_t pages = (last - first) / page_bytes, threads = nodes.size();
    bool placed = true;
    for (size_t thread = 0, next; thread < threads; thread = next) {
        for (next = thread + 1; next < threads && nodes[next] == nodes[thread];) ++next;
        placed &= set_policy(first + pages * thread / threads * page_bytes, first + pages * next / threads * page_bytes,
                             kPreferred, uint64_t{1} << nodes[thread]);
    }
    return placed;
#else
    (void)memory, (void)bytes, (void)page_bytes, (void)nodes, (void)in_shares;
    return false;
#endif
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
