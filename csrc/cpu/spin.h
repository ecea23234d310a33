// What a thread does between two looks at a value that another is about to change.
#pragma once

namespace octavo {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    // Not `yield`, which most cores take for nothing: they would look so often that they hold up whoever writes.
    asm volatile("isb" : : : "memory");
#endif
}

}  // namespace octavo
