// How many threads this process should use: physical cores within its affinity mask, bounded by the CPU quota of its
// control group (a container's --cpus). More threads than that only take turns, and spin at each other meanwhile.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include "thread_pool.h"

namespace octavo {

namespace {

#ifdef __linux__

int physical_cores_in_mask() {
    constexpr int kCpus = 8192;
    cpu_set_t* mask = CPU_ALLOC(kCpus);
    if (mask == nullptr) return 0;
    const size_t bytes = CPU_ALLOC_SIZE(kCpus);
    CPU_ZERO_S(bytes, mask);
    int cores = 0;
    if (sched_getaffinity(0, bytes, mask) == 0) {
        // Hardware threads of one core list the same siblings.
        std::set<std::string> siblings;
        for (int cpu = 0; cpu < kCpus; ++cpu) {
            if (!CPU_ISSET_S(cpu, bytes, mask)) continue;
            std::string line = std::to_string(cpu);
            std::ifstream file("/sys/devices/system/cpu/cpu" + line + "/topology/thread_siblings_list");
            std::getline(file, line);
            siblings.insert(line.empty() ? std::to_string(cpu) : line);
        }
        cores = static_cast<int>(siblings.size());
    }
    CPU_FREE(mask);
    return cores;
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

// The least quota from this process's group up to the root (in a container the root is all there is to see).
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

int physical_cores_in_mask() {
    int cores = 0;
#ifdef __APPLE__
    size_t size = sizeof(cores);
    if (sysctlbyname("hw.physicalcpu", &cores, &size, nullptr, 0) != 0) cores = 0;
#endif
    return cores;
}

double cpu_quota() { return INFINITY; }

#endif

}  // namespace

int default_num_threads() {
    int threads = physical_cores_in_mask();
    if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    const double quota = cpu_quota();
    if (quota < threads) threads = static_cast<int>(std::ceil(quota));
    return std::max(threads, 1);
}

}  // namespace octavo
