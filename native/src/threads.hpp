// The worker threads of one kernel and the barrier between the phases of a step.
//
// Waiting spins briefly, then yields the CPU: a pure spin loses a whole time slice at every barrier
// once anything else runs. Between steps threads sleep. Takes memory only in start().
#pragma once

#include <atomic>
#include <cstdint>
#include <pthread.h>

namespace bt {

class Threads {
  public:
    using Work = void (*)(void* context, int thread);

    Threads() = default;
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;
    ~Threads() { stop(); }

    // False when the system gives no thread; then none runs. `count` includes the caller.
    bool start(int count, Work work, void* context);
    void stop();
    // Run the work on all threads, the caller being thread 0; returns when all are done.
    void run();
    // Called by every thread of a run, the same number of times.
    void barrier();
    int count() const { return count_; }

    static constexpr size_t kStackBytes = 256 * 1024;

  private:
    struct Worker {
        Threads* owner;
        pthread_t handle;
        int index;
    };
    static constexpr int kCountMax = 64;

    static void* enter(void* worker);
    void loop(int index);

    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint32_t> run_{0};
    std::atomic<uint32_t> sleeping_{0};
    std::atomic<bool> is_stopping_{false};
    int count_ = 1;
    int started_ = 0;
    Work work_ = nullptr;
    void* context_ = nullptr;
    Worker workers_[kCountMax] = {};
};

}  // namespace bt
