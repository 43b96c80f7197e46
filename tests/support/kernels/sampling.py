"""The kernels of sampling on the host: their structures, a batch of requests, and its launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from support.kernels import cuda

if TYPE_CHECKING:
    from support.kernels.cuda import Array, HostKernels

NONE = 2**32 - 1
TILE, WARP_IDS, BLOCK_IDS = 128, 512, 4096
LIST = 16

WORD, FLOAT = np.uint32, np.float32

# begin generated: Entry
# fmt: off
IS_PROCESSED = 1
IS_GREEDY = 2
HAS_ALLOWED = 4
HAS_STOPS = 8
IS_SUPPRESSED = 16
IS_COUNTED = 32
IS_RECORDED = 64
COUNTS_PROMPT = 128
HAS_LOGPROBS = 256
HAS_RAW_LOGPROBS = 512
#: ``Entry`` of ``cuda/sample.cuh``.
ENTRY = np.dtype(
    [
        ("seed", np.uint64),
        ("row", np.uint32),
        ("slot", np.uint32),
        ("index", np.uint32),
        ("draft", np.uint32),
        ("given", np.uint32),
        ("mask", np.uint32),
        ("processed", np.uint32),
        ("position", np.uint32),
        ("length", np.uint32),
        ("flags", np.uint32),
        ("factor", np.float32),
        ("top_n_sigma", np.float32),
        ("top_k", np.uint32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("typical_p", np.float32),
        ("epsilon_cutoff", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("no_repeat_ngram_size", np.uint32),
        ("num_biases", np.uint32),
        ("num_sequences", np.uint32),
        ("num_top", np.uint32),
        ("first_top", np.uint32),
        ("reserved", np.uint32),
    ],
    align=True,
)
# fmt: on
# end generated: Entry

#: ``Result`` of ``cuda/sample.cuh``.
RESULT = np.dtype(
    [
        ("sum", np.float64),
        ("token", WORD),
        ("outcome", WORD),
        ("score", FLOAT),
        ("best", FLOAT),
        ("num_top", WORD),
        ("reserved", WORD),
    ],
    align=True,
)
TOP = np.dtype([("token", WORD), ("score", FLOAT)])
BIAS = np.dtype([("token", WORD), ("value", FLOAT)])

SLOT_ARRAYS = [
    *("last_tokens", "lengths", "generated", "allowed", "stops"),
    *("biases", "sequences", "history", "counts"),
]
BATCH_ARRAYS = [
    *("entries", "logits", "masks", "processed", "scores", "highest", "highest_logits", "sums"),
    *("sums_of_exp", "masses", "bounds", "results", "tops"),
]


class Slots(ctypes.Structure):
    """``Slots`` of ``cuda/sample.cuh``."""

    _fields_ = [(name, ctypes.c_void_p) for name in SLOT_ARRAYS] + [
        (name, ctypes.c_int) for name in ("vocabulary", "words", "list", "positions")
    ]


class Batch(ctypes.Structure):
    """``Batch`` of ``cuda/sample.cuh``."""

    _fields_ = [(name, ctypes.c_void_p) for name in BATCH_ARRAYS] + [("slots", Slots)]


class Admission(ctypes.Structure):
    """``Admission`` of ``cuda/sample_slots.cu``."""

    _fields_ = [
        (name, ctypes.c_uint32) for name in ("slot", "last_token", "length", "generated", "is_counted")
    ]


@dataclass(frozen=True)
class Request:
    """The parameters of a slot."""

    temperature: float = 1.0
    top_n_sigma: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    repetition_penalty_scope: str = "all"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    prompt: tuple[int, ...] = (1,)
    generated: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: tuple[int, bool] | None = None  # the most likely ids, and whether they are processed

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is sampled."""
        return self.temperature < 1e-5

    @property
    def factor(self) -> np.float32:
        """The factor on the scores."""
        return np.float32(1) if self.is_greedy else np.float32(1) / np.float32(self.temperature)

    @property
    def is_penalised(self) -> bool:
        """Whether a penalty is set."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_recorded(self) -> bool:
        """Whether the tokens so far exclude others."""
        return self.no_repeat_ngram_size > 0 or bool(self.bad_token_sequences)

    @property
    def is_restricted(self) -> bool:
        """Whether some ids are never sampled."""
        return self.allowed_token_ids is not None or bool(self.bad_token_ids)


@dataclass(frozen=True)
class Position:
    """An entry of a batch: its slot is the number of the request."""

    slot: int
    index: int
    draft: int | None = None
    given: int | None = None
    mask: Array | None = None  # of booleans
    processed: Array | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of an entry."""

    token: int
    outcome: str
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def bitmap(allowed: Array) -> Array:
    """Bits of booleans, in words."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


class Sampler:
    """Slots with requests."""

    def __init__(
        self, kernels: HostKernels, vocabulary: int, requests: list[Request], positions: int = 64
    ) -> None:
        self.kernels, self.vocabulary, self.requests = kernels, vocabulary, requests
        self.bounds = np.zeros((0, 2), np.uint32)  # of the last batch
        count, self.words, self.positions = len(requests), -(-vocabulary // 32), positions
        self.arrays = {
            "last_tokens": np.zeros(count, np.uint32),
            "lengths": np.zeros(count, np.uint32),
            "generated": np.zeros(count, np.uint32),
            "allowed": np.zeros((count, self.words), np.uint32),
            "stops": np.zeros((count, self.words), np.uint32),
            "biases": np.zeros((count, LIST), BIAS),
            "sequences": np.zeros((count, 2 * LIST + 1), np.uint32),
            "history": np.full((count, positions), 7_777_777, np.uint32),
            "counts": np.full((count, vocabulary), 7_777_777, np.uint32),
        }
        for slot, request in enumerate(requests):
            self._admit(slot, request)

    def _slots(self) -> Slots:
        return Slots(
            *cuda.addresses(*self.arrays.values()), self.vocabulary, self.words, LIST, self.positions
        )

    def _admit(self, slot: int, request: Request) -> None:
        ids = np.arange(self.vocabulary)
        allowed = ~np.isin(ids, request.bad_token_ids)
        if request.allowed_token_ids is not None:
            allowed &= np.isin(ids, request.allowed_token_ids)
        self.arrays["allowed"][slot] = bitmap(allowed)
        self.arrays["stops"][slot] = bitmap(np.isin(ids, request.stop_token_ids))
        biases = sorted(request.logit_bias, key=lambda bias: bias[0])
        self.arrays["biases"][slot, : len(biases)] = biases
        ends = np.cumsum([0, *map(len, request.bad_token_sequences)])
        sequences = [*ends, *(token for sequence in request.bad_token_sequences for token in sequence)]
        self.arrays["sequences"][slot, : len(sequences)] = sequences
        tokens = (*request.prompt, *request.generated)
        needs_history = request.is_recorded or request.is_penalised
        if needs_history:
            self.arrays["history"][slot, : len(tokens)] = tokens
        length = len(tokens) if needs_history else 0
        admission = Admission(slot, tokens[-1], length, len(request.generated), request.is_penalised)
        blocks = -(-self.vocabulary // BLOCK_IDS) if request.is_penalised else 1
        self.kernels.launch("sample_admit", [blocks], 256, self._slots(), admission)
        if request.is_penalised:
            self.kernels.launch("sample_count", [-(-length // BLOCK_IDS)], 256, self._slots(), admission)

    def _flags(self, request: Request, position: Position) -> int:
        if position.given is not None:
            return HAS_LOGPROBS | HAS_RAW_LOGPROBS if request.logprobs else 0
        is_suppressed = position.index < request.min_tokens and bool(request.stop_token_ids)
        flags = {
            HAS_ALLOWED: request.is_restricted,
            HAS_STOPS: bool(request.stop_token_ids),
            IS_SUPPRESSED: is_suppressed,
            IS_COUNTED: request.is_penalised,
            IS_RECORDED: request.is_recorded,
        }
        is_processed = position.mask is not None or bool(request.logit_bias)
        is_processed |= any(flags[flag] for flag in flags if flag != HAS_STOPS)
        flags |= {
            IS_PROCESSED: is_processed,
            IS_GREEDY: request.is_greedy or request.top_k == 1,
            COUNTS_PROMPT: request.repetition_penalty_scope == "all",
            HAS_LOGPROBS: request.logprobs is not None,
            HAS_RAW_LOGPROBS: request.logprobs is not None and not request.logprobs[1],
        }
        return sum(flag for flag, is_set in flags.items() if is_set)

    def _entries(self, positions: list[Position]) -> Array:
        entries = np.zeros(len(positions), ENTRY)
        masks, processed, first = 0, 0, 0
        for number, position in enumerate(positions):
            request, entry = self.requests[position.slot], entries[number]
            entry["row"], entry["slot"], entry["index"] = number, position.slot, position.index
            entry["draft"] = NONE if position.draft is None else position.draft
            entry["given"] = NONE if position.given is None else position.given
            entry["mask"] = entry["processed"] = NONE
            if position.mask is not None:
                entry["mask"], masks = masks, masks + 1
            if position.processed is not None:
                entry["processed"], processed = processed, processed + 1
            follows = number > 0 and positions[number - 1].slot == position.slot and position.given is None
            first = first if follows and positions[number - 1].given is None else number
            if position.given is None:
                entry["position"] = number - first
                entries[first]["length"] += 1
            entry["flags"] = self._flags(request, position)
            entry["factor"] = request.factor
            for name in ENTRY.names or ():
                if hasattr(request, name):
                    entry[name] = getattr(request, name)
            entry["num_biases"] = len(request.logit_bias)
            entry["num_sequences"] = len(request.bad_token_sequences)
            entry["num_top"] = min(request.logprobs[0], self.vocabulary) if request.logprobs else 0
            if number:
                before = entries[number - 1]
                entry["first_top"] = before["first_top"] + before["num_top"]
            if position.given is not None:
                entry["no_repeat_ngram_size"] = entry["num_sequences"] = 0
        return entries

    def sample(self, logits: Array, positions: list[Position]) -> list[Outcome]:
        """Samples the positions, each from its row of the logits."""
        count, vocabulary = len(positions), self.vocabulary
        tiles, warp_tiles = -(-vocabulary // TILE), -(-vocabulary // WARP_IDS)
        entries = self._entries(positions)
        masks = [bitmap(position.mask) for position in positions if position.mask is not None]
        processed = [position.processed for position in positions if position.processed is not None]

        def floats(width: int) -> Array:
            return np.full((count, width), 1e30, np.float32)

        arrays: dict[str, Any] = {
            "entries": entries,
            "logits": np.ascontiguousarray(logits, np.float32),
            "masks": np.array(masks, np.uint32),
            "processed": np.array(processed, np.float32),
            "scores": floats(vocabulary),
            "highest": floats(tiles),
            "highest_logits": floats(tiles),
            "sums": floats(tiles),
            "sums_of_exp": floats(warp_tiles),
            "masses": np.zeros((count, tiles), np.uint64),
            "bounds": np.full((count, 2), 7_777_777, np.uint32),
            "results": np.zeros(count, RESULT),
            "tops": np.zeros(max(int(entries["num_top"].sum()), 1), TOP),
        }
        blocks = -(-vocabulary // BLOCK_IDS)

        def launch(name: str, grid: list[int], threads: int, *values: Any) -> None:
            batch = Batch(*cuda.addresses(*arrays.values()), self._slots())
            self.kernels.launch(name, grid, threads, batch, *values)

        launch("sample_process", [blocks, count], 256)
        launch("sample_exclude", [2, count], 256)
        launch("sample_maxima", [blocks, count], 256)
        launch("sample_bounds", [count], 256)
        self.bounds = arrays["bounds"]
        launch("sample_weights", [blocks, count], 256)
        launch("sample_finish", [count], 256)
        launch("sample_commit", [-(-count // 256)], 256, count)
        launch("sample_logprobs", [count], 256)
        return [self._outcome(entries[i], arrays["results"][i], arrays["tops"]) for i in range(count)]

    def _outcome(self, entry: Array, result: Array, tops: Array) -> Outcome:
        name = ("token", "no candidates", "rejected")[result["outcome"]]
        outcome = Outcome(int(result["token"]), name)
        if name != "token" or not entry["flags"] & HAS_LOGPROBS:
            return outcome
        factor = np.float32(1) if entry["flags"] & HAS_RAW_LOGPROBS else entry["factor"]
        found = tops[entry["first_top"] :][: result["num_top"]]
        with np.errstate(invalid="ignore", divide="ignore"):

            def logprob(score: Any) -> float:
                return float(np.float64((score - result["best"]) * factor) - np.log(result["sum"]))

            top = sorted((-score, int(token)) for token, score in found)
            return replace(
                outcome,
                logprob=logprob(result["score"]),
                top=[(token, logprob(-score)) for score, token in top],
            )
