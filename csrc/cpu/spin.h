// Waits a moment, between two looks at a value that another thread is about to change. Used by thread_pool.cpp and
// all_reduce.cpp.
#pragma once

namespace octavo {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    // Not `yield`: most cores ignore it, and would look so often that they hold up the thread that writes.
    asm volatile("isb" : : : "memory");
#endif
}

}  // namespace octavo
