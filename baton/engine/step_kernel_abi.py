"""The step kernel's C interface as cffi reads it, its numbers as enums, and loading the library.

Owns the declarations, which repeat `native/include/baton_step.h` (a test compares them), and the
translation of its errors. Never holds a kernel: that is `baton.engine.step_kernel`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from baton.engine.step_kernel_build import LIBRARY
from baton.errors import Reason, ServiceError

ABI_VERSION: Final = 3
BATCH_LIMIT: Final = 64
THREADS_LIMIT: Final = 64
PHASES: Final = (
    "embed",
    "query_key_value",
    "attention",
    "output",
    "gate_up",
    "down",
    "head",
    "checksum",
    "barrier",
    "total",
)

DECLARATIONS: Final = """
typedef struct bt_config {
    uint32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
    uint32_t max_context;
    uint32_t block_tokens;
    uint32_t kv;
    uint32_t activation;
    uint32_t isa;
    uint32_t batch_max;
    uint32_t threads;
    uint32_t prefetch_pages;
    uint32_t has_tied_head;
    uint32_t has_qkv_bias;
    uint32_t has_qk_norm;
    uint32_t rotary_dim;
    float rms_eps;
    uint64_t weight_bytes;
} bt_config;
typedef struct bt_memory {
    uint64_t weight_bytes;
    uint64_t buffer_bytes;
} bt_memory;
typedef struct bt_kernel bt_kernel;
uint32_t bt_abi_version(void);
int bt_resolve_isa(uint32_t isa);
const char* bt_isa_name(int isa);
uint64_t bt_packed_bytes(uint32_t kind, uint64_t rows, uint64_t columns);
int bt_create(const bt_config* config, bt_kernel** kernel);
void bt_destroy(bt_kernel* kernel);
int bt_set_matrix(bt_kernel* kernel, uint32_t role, uint32_t layer, uint32_t kind,
                  const void* source, uint64_t source_bytes);
int bt_set_vector(bt_kernel* kernel, uint32_t role, uint32_t layer, const float* weight,
                  uint64_t items);
int bt_set_rope(bt_kernel* kernel, const float* cosine, const float* sine, uint64_t items);
int bt_set_pages(bt_kernel* kernel, void* base, uint64_t slot_bytes, uint64_t pages);
int bt_seal(bt_kernel* kernel);
void bt_memory_use(const bt_kernel* kernel, bt_memory* memory);
uint8_t* bt_weight_memory(bt_kernel* kernel, uint64_t* bytes);
int bt_step(bt_kernel* kernel, uint32_t batch, const int32_t* tokens, const int32_t* positions,
            const int32_t* tables, const uint32_t* table_ends, float* logits,
            int32_t* best_tokens, uint32_t* slot_crcs, uint32_t* culprit);
uint32_t bt_crc32c(uint32_t crc, const void* data, uint64_t bytes);
uint64_t bt_read_all(const void* data, uint64_t bytes);
void bt_take_profile(bt_kernel* kernel, uint64_t* nanoseconds);
"""


class Error(IntEnum):
    """`enum bt_error`."""

    OK = 0
    BAD_SHAPE = -1
    BAD_MATRIX = -2
    NO_MEMORY = -3
    NOT_SEALED = -4
    INCOMPLETE = -5
    BAD_BATCH = -6
    BAD_TOKEN = -7
    BAD_POSITION = -8
    SHORT_TABLE = -9
    BAD_PAGE = -10
    SHARED_SLOT = -11
    NO_ISA = -12


class Role(IntEnum):
    """`enum bt_role`: what a weight is for."""

    EMBEDDING = 0
    HEAD = 1
    FINAL_NORM = 2
    QUERY = 3
    KEY = 4
    VALUE = 5
    OUTPUT = 6
    GATE = 7
    UP = 8
    DOWN = 9
    ATTENTION_NORM = 10
    FEED_FORWARD_NORM = 11
    QUERY_BIAS = 12
    KEY_BIAS = 13
    VALUE_BIAS = 14
    QUERY_NORM = 15
    KEY_NORM = 16


class Kind(IntEnum):
    """`enum bt_kind`: how a matrix is kept."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    Q8_0 = 3
    Q4_1 = 4


class Isa(StrEnum):
    """Instruction sets, as configuration spells them; `auto` takes the best there is."""

    AUTO = "auto"
    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512_BF16 = "avx512_bf16"
    NEON = "neon"

    @property
    def code(self) -> int:
        """Its number in `enum bt_isa`."""
        return list(Isa).index(self)


class Activation(StrEnum):
    """What the inputs of integer matrices are rounded to, each block of 32 with its own scale."""

    INT16 = "int16"
    INT8 = "int8"

    @property
    def code(self) -> int:
        """Its number in `enum bt_activation`."""
        return list(Activation).index(self)


_STEP_FAULTS: Final = {
    Error.BAD_BATCH: ("batch", "there are more sequences than the kernel has buffers for"),
    Error.BAD_TOKEN: ("tokens", "the token id is outside the vocabulary"),
    Error.BAD_POSITION: ("first_position", "the position leaves the context"),
    Error.SHORT_TABLE: ("page_table", "the page table has too few pages for the position"),
    Error.BAD_PAGE: ("page_table", "the page table names a page that does not exist"),
    Error.SHARED_SLOT: ("page_table", "two sequences would write one token slot"),
}


def step_error(code: int, culprit: int) -> ServiceError:
    """The error of a refused step."""
    fault = _STEP_FAULTS.get(Error(code))
    if fault is None:
        return setup_error(code, "step")
    field, what = fault
    return ServiceError(Reason.INVALID_REQUEST, f"sequence {culprit}: {what}", field=field)


def setup_error(code: int, what: str) -> ServiceError:
    """The error of a kernel that could not be made; `what` names the call or the tensor."""
    error = Error(code)
    if error in (Error.BAD_SHAPE, Error.BAD_MATRIX, Error.NO_ISA):
        return ServiceError(
            Reason.UNSUPPORTED,
            f"the step kernel cannot compute this model: {what} ({error.name}); use the torch path",
            field=what,
        )
    return ServiceError(Reason.INTERNAL, f"the step kernel failed in {what}: {error.name}")


@cache
def load(path: Path = LIBRARY) -> tuple[Any, Any]:
    """(ffi, library). Raises ServiceError UNSUPPORTED saying how to get the library."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        cause = "is not built" if not path.is_file() else f"cannot be loaded ({error})"
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"the step kernel {cause}; with a C++20 compiler and CMake: "
            "python -m baton.engine.step_kernel_build",
        ) from error
    version = library.bt_abi_version()
    if version != ABI_VERSION:
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"the step kernel has interface {version}, this version needs {ABI_VERSION}: "
            "python -m baton.engine.step_kernel_build",
        )
    return ffi, library


def is_supported(isa: Isa) -> bool:
    """Whether this CPU and this build have `isa`. Raises as `load` does."""
    _, library = load()
    return int(library.bt_resolve_isa(isa.code)) >= 0


def resolved_isa(isa: Isa = Isa.AUTO) -> Isa:
    """The instruction set that `isa` means here. Raises as `load` does, and when it has none."""
    _, library = load()
    code = int(library.bt_resolve_isa(isa.code))
    if code < 0:
        raise setup_error(code, f"isa {isa}")
    return list(Isa)[code]
