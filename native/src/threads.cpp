#include "threads.hpp"

#include <sched.h>
#include <signal.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bt {
namespace {

// A pause is some 20 ns: about 40 us inside a step, 20 us between steps.
constexpr int kSpinsInStep = 2000;
constexpr int kSpinsIdle = 1000;

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleep while `word` is `value`. (std::atomic::wait would export a symbol of its own.)
void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
    static_assert(sizeof word == sizeof(uint32_t));
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load(std::memory_order_acquire) == value) {
        sched_yield();
    }
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

bool Threads::start(int count, Work work, void* context) {
    work_ = work;
    context_ = context;
    count_ = count;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    bool is_started = pthread_attr_setstacksize(&attributes, kStackBytes) == 0;
    // Signals are the host program's: none may be handled on our small stacks.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < count && is_started; ++i) {
        workers_[i] = {.owner = this, .handle = {}, .index = i};
        is_started = pthread_create(&workers_[i].handle, &attributes, enter, &workers_[i]) == 0;
        started_ += is_started ? 1 : 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!is_started) {
        stop();
    }
    return is_started;
}

void Threads::stop() {
    is_stopping_.store(true, std::memory_order_relaxed);
    run_.fetch_add(1);
    wake_all(run_);
    for (int i = 1; i <= started_; ++i) {
        pthread_join(workers_[i].handle, nullptr);
    }
    started_ = 0;
    count_ = 1;
}

void Threads::run() {
    if (count_ > 1) {
        run_.fetch_add(1);
        if (sleeping_.load() > 0) {
            wake_all(run_);
        }
    }
    work_(context_, 0);
    barrier();
}

void Threads::barrier() {
    if (count_ == 1) {
        return;
    }
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(count_)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; phase_.load(std::memory_order_acquire) == phase; ++i) {
        if (i < kSpinsInStep) {
            pause_cpu();
        } else {
            sched_yield();
        }
    }
}

void* Threads::enter(void* worker) {
    const Worker* self = static_cast<Worker*>(worker);
    self->owner->loop(self->index);
    return nullptr;
}

void Threads::loop(int index) {
    uint32_t seen = 0;
    while (true) {
        for (int i = 0; i < kSpinsIdle && run_.load(std::memory_order_acquire) == seen; ++i) {
            pause_cpu();
        }
        while (run_.load() == seen) {
            // Announced first: either this thread sees the new run, or the runner sees a sleeper.
            sleeping_.fetch_add(1);
            sleep_on(run_, seen);
            sleeping_.fetch_sub(1);
        }
        // Runs never overlap: one more than the last is the only other value.
        ++seen;
        if (is_stopping_.load(std::memory_order_relaxed)) {
            return;
        }
        work_(context_, index);
        barrier();
    }
}

}  // namespace bt
