"""A scheduler in miniature: what `LaneLoop` drives, with requests that only count tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream.lane_loop import LaneLoop

_FACTS = MoeFacts((0,), num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)


class Req:
    """A request that ends after `length` tokens."""

    def __init__(self, name: str, length: int = 100, prefix_len: int = 0) -> None:
        self.name, self.length, self.prefix_len = name, length, prefix_len
        self.origin_input_ids: list[int] = []
        self.output_ids: list[int] = []
        self.extend_end = prefix_len

    def finished(self) -> bool:
        return len(self.output_ids) >= self.length

    def __repr__(self) -> str:
        return self.name


class Batch:
    """As much of SGLang's ScheduleBatch as the loop uses."""

    room: Any = staticmethod(lambda batch: True)
    """Whether a batch's next step has memory."""

    def __init__(self, reqs: list[Req], prefix_lens: list[int] | None = None) -> None:
        self.reqs, self.prefix_lens = reqs, prefix_lens
        self.chunked_req: Req | None = None
        self.released: list[tuple[Req, int]] = []

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def copy(self) -> Batch:
        return Batch(list(self.reqs), self.prefix_lens)

    def merge_batch(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs

    def filter_batch(self, keep_indices: list[int] | None = None) -> None:
        kept = range(len(self.reqs)) if keep_indices is None else keep_indices
        self.reqs = [
            self.reqs[i] for i in kept if keep_indices is not None or not self.reqs[i].finished()
        ]

    def release_req(self, index: int, remaining: int) -> None:
        self.released.append((self.reqs[index], remaining))

    def check_decode_mem(self) -> bool:
        return self.room(self)

    def _get_decode_retraction_order(self, reqs: list[Req]) -> list[int]:
        return sorted(range(len(reqs)), key=lambda i: -len(reqs[i].output_ids))


class Result(NamedTuple):
    """Of a step: whose, and its number."""

    lane: int
    number: int
    delay_sample_func: Any
    """None: it has sampled."""


class Event:
    """A step's end: past unless the scheduler's `unended` holds it."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler
        self.lane = -1

    def record(self, stream: Any) -> None:
        self.lane = self._scheduler.context.lane
        self._scheduler.log.append(("recorded", self.lane))

    def query(self) -> bool:
        return self.lane not in self._scheduler.unended

    def synchronize(self) -> None:
        self._scheduler.unended.discard(self.lane)

    def wait(self, stream: Any = None) -> None:
        """Of another stream, or of what the scheduler itself submits from now on."""
        entry = ("wait", self.lane, stream) if stream else ("written after", self.lane)
        self._scheduler.log.append(entry)


class FakeScheduler:
    """Runs batches at once, and logs what the loop has it do."""

    def __init__(self, lanes: int, attention_tp: int = 1) -> None:
        config = AfdConfig(attention_ranks=1, ffn_ranks=1, attention_tp=attention_tp, lanes=lanes)
        self.context = RankContext(config, 0, FAMILIES["Qwen3MoeForCausalLM"], _FACTS, {})
        self.log: list[tuple[Any, ...]] = []
        self.waiting: list[Req] = []
        self.unended: set[int] = set()
        """Lanes whose steps do not end."""
        self.delayed: Any = None
        """What steps sample with later, if they do not at once."""
        self.work_elsewhere = 0
        self.cycles = self.forward_ct = 0
        self.taken: list[Req] = []
        self.enable_overlap = True
        self.chunked_req: Req | None = None
        self.gracefully_exit = self._engine_paused = self._sched_idled = False
        self.device, self.forward_stream = "cpu", "forward stream"
        self.runner = SimpleNamespace(shared_read_done_event=None, attn_backend="backend")
        self.tp_worker = SimpleNamespace(model_runner=self.runner)
        self.model_worker = SimpleNamespace(last_shared_read_runner=self.runner)
        self.batch_record_buf: list[Any] = [None, None]
        self.batch_record_ct = 0
        self.running_batch = self.last_batch = self.result_queue = None
        self.req_to_token_pool = self.token_to_kv_pool_allocator = self.tree_cache = None
        self.device_module = SimpleNamespace(Event=lambda: Event(self))
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=self._agree)

    def names(self, batch: Any) -> str:
        return "".join(sorted(req.name for req in batch.reqs))

    def ingest_requests(self) -> None:
        self.cycles -= 1
        self.gracefully_exit = self.cycles == 0

    def _agree(self, batch: Any) -> Any:
        work = self.context.work | self.work_elsewhere
        self.context.plan = SimpleNamespace(work=work)  # type: ignore[assignment]
        elsewhere = self.work_elsewhere >> self.context.lane & 1
        return Batch([]) if batch is None and elsewhere else batch

    def get_new_batch_prefill(self, running: Any) -> Any:
        reqs, self.waiting = self.waiting, []
        batch = Batch(reqs, [req.prefix_len for req in reqs]) if reqs else None
        return SimpleNamespace(batch_to_run=batch)

    def update_running_batch(self, batch: Batch) -> Batch:
        return batch

    def run_batch(self, batch: Batch) -> Result:
        self.batch_record_ct = (self.batch_record_ct + 1) % 2
        self.batch_record_buf[self.batch_record_ct] = self.names(batch)
        self.forward_ct += 1
        self.log.append(("run", self.context.lane, self.names(batch)))
        assert self.runner.attn_backend == self.context.lane
        return Result(self.context.lane, len(self.log), self.delayed)

    def process_batch_result(self, batch: Batch, result: Result) -> None:
        assert self.runner.attn_backend == result.lane
        self.log.append(("read", result.lane, self.names(batch)))
        for req in batch.reqs:
            req.output_ids.append(0)

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None:
        self.log.append(("sample", self.context.lane))

    def on_idle(self) -> None:
        self.log.append(("idle",))

    def process_pending_chunked_abort(self) -> None: ...

    def _record_scheduler_state_for_paused_engine(self) -> None:
        self.log.append(("paused",))


class FakeLoop(LaneLoop):
    """The loop over fake batches; every lane has an attention backend of its own."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        parts = [{"attn_backend": lane} for lane in range(scheduler.context.config.lanes + 1)]
        super().__init__(scheduler, scheduler.context, parts)

    def _no_requests(self) -> Any:
        return Batch([])

    def _decoding(self, reqs: list[Any]) -> Any:
        return Batch(reqs)


def cycles(scheduler: FakeScheduler, loop: FakeLoop, count: int) -> list[tuple[Any, ...]]:
    """Run `count` cycles; what was logged meanwhile."""
    scheduler.cycles, scheduler.gracefully_exit = count, False
    scheduler.log.clear()
    loop.run()
    quiet = ("sample", "written after", "recorded")
    return [entry for entry in scheduler.log if entry[0] not in quiet]
