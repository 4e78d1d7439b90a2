// bt_step's door: a request is checked whole, turned into a plan, and run.
//
// Page tables come from outside: no number of them is used before it was compared with what was
// declared.
#include <cstring>

#include "crc32c.hpp"
#include "kernel.hpp"

using namespace bt;

namespace {

// Work of this many rows is worth a barrier to share it.
constexpr int kSharedRowsMin = 16;

int32_t best_token(const bt_kernel& kernel, int b) {
    int best = 0;
    for (int i = 1; i < kernel.threads.count(); ++i) {
        if (kernel.workers[i].best[b] > kernel.workers[best].best[b]) {
            best = i;
        }
    }
    return kernel.workers[best].token[b];
}

struct Request {
    const int32_t* tokens;
    const int32_t* positions;
    const int32_t* tables;
    const uint32_t* table_ends;
};

// One sequence's numbers against what was declared; nothing of its table is used before this.
int check_sequence(const bt_kernel& kernel, const Request& request, uint32_t b) {
    const bt_config& c = kernel.config;
    if (request.tokens[b] < 0 || static_cast<uint32_t>(request.tokens[b]) >= c.vocabulary) {
        return BT_BAD_TOKEN;
    }
    const int32_t position = request.positions[b];
    if (position < 0 || static_cast<uint32_t>(position) >= c.max_context) {
        return BT_BAD_POSITION;
    }
    const uint32_t first = b == 0 ? 0 : request.table_ends[b - 1];
    const uint32_t needed = static_cast<uint32_t>(position) / c.block_tokens + 1;
    if (request.table_ends[b] < first || request.table_ends[b] - first < needed) {
        return BT_SHORT_TABLE;
    }
    for (uint32_t i = 0; i < needed; ++i) {
        const int32_t page = request.tables[first + i];
        if (page < 0 || static_cast<uint64_t>(page) >= kernel.page_count) {
            return BT_BAD_PAGE;
        }
    }
    return BT_OK;
}

int32_t tail_page(const bt_kernel& kernel, const Request& request, uint32_t b) {
    const uint32_t first = b == 0 ? 0 : request.table_ends[b - 1];
    return request
        .tables[first + static_cast<uint32_t>(request.positions[b]) / kernel.config.block_tokens];
}

bool shares_slot(const bt_kernel& kernel, const Request& request, uint32_t b) {
    const int32_t block = static_cast<int32_t>(kernel.config.block_tokens);
    for (uint32_t other = 0; other < b; ++other) {
        if (tail_page(kernel, request, other) == tail_page(kernel, request, b) &&
            request.positions[other] % block == request.positions[b] % block) {
            return true;
        }
    }
    return false;
}

void plan(bt_kernel& kernel, const Request& request, int batch) {
    Step& step = kernel.step;
    const int block = static_cast<int>(kernel.config.block_tokens);
    step.batch = batch;
    step.tokens = request.tokens;
    step.positions = request.positions;
    for (int b = 0; b < batch; ++b) {
        step.tables[b] = request.tables + (b == 0 ? 0 : request.table_ends[b - 1]);
        const int length = request.positions[b] + 1;
        const int part = (length + kChunksMax - 1) / kChunksMax;
        const int tokens = part > kChunkTokensMin ? part : kChunkTokensMin;
        step.lengths[b] = length;
        step.chunk_tokens[b] = (tokens + block - 1) / block * block;
    }
    step.group_count = 0;
    for (int first = 0, width = kernel.table->width_max; first < batch; first += width) {
        while (width > batch - first) {
            width /= 2;
        }
        step.groups[step.group_count++] = {first, width};
    }
    step.is_shared = batch * (kernel.threads.count() - 1) >= kSharedRowsMin;
}

}  // namespace

int bt_step(bt_kernel* kernel, uint32_t batch, const int32_t* tokens, const int32_t* positions,
            const int32_t* tables, const uint32_t* table_ends, float* logits, int32_t* best_tokens,
            uint32_t* slot_crcs, uint32_t* culprit) {
    *culprit = 0;
    if (!kernel->is_sealed) {
        return BT_NOT_SEALED;
    }
    if (batch == 0 || batch > kernel->config.batch_max) {
        return BT_BAD_BATCH;
    }
    const Request request = {tokens, positions, tables, table_ends};
    for (uint32_t b = 0; b < batch; ++b) {
        *culprit = b;
        const int error = check_sequence(*kernel, request, b);
        if (error != BT_OK) {
            return error;
        }
        if (shares_slot(*kernel, request, b)) {
            return BT_SHARED_SLOT;
        }
    }
    plan(*kernel, request, static_cast<int>(batch));
    kernel->step.logits = logits;
    kernel->step.slot_crcs = slot_crcs;
    kernel->step.needs_best = best_tokens != nullptr;
    kernel->threads.run();
    for (uint32_t b = 0; best_tokens != nullptr && b < batch; ++b) {
        best_tokens[b] = best_token(*kernel, static_cast<int>(b));
    }
    return BT_OK;
}

uint32_t bt_crc32c(uint32_t crc, const void* data, uint64_t bytes) {
    return crc32c(crc, data, bytes);
}

void bt_take_profile(bt_kernel* kernel, uint64_t* nanoseconds) {
    memcpy(nanoseconds, kernel->profile, sizeof kernel->profile);
    memset(kernel->profile, 0, sizeof kernel->profile);
}
