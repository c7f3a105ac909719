"""The scheduler's loop with several lanes: decode batches in flight in turn, and one prefill lane.

SGLang's overlap loop keeps one decode batch whose next step is launched before the last one's
result is read.  Here each of n decode lanes does that with requests of its own, so that while one
lane's rows are with the F ranks another lane's attention runs.  Prefills have a lane of their own,
numbered n.  In every cycle all ranks take the lanes in one order: prefill, then 0 to n - 1.  In the
prefill lane's turn each rank tells the others in which lanes it has requests; lanes that are empty
everywhere are left out, and in the others a rank without requests joins as an idle one.

Rules that keep the lanes apart (one stream gave SGLang all of them for nothing):

* An extend's requests join a decode lane once the extend has ended and its result was read.
* Freed pages and slots wait in quarantine, see `sglang_afd.upstream.quarantine`.
* An extend that reuses a prefix runs after the steps that other lanes had launched before it.
* What SGLang keeps of a launched step (its result, the tensors it must not lose) is kept by lane.
* What a step reads of the scheduler's tables is not written to before it has read it.  SGLang waits
  for that right after the launch; here the lane's next turn does, not to hold up other lanes.
* On a GPU streams, graphs and buffers are the lane's own, see `sglang_afd.upstream.lane_parts`.

On the CPU a launched step has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_afd.context import RankContext
from sglang_afd.lanes import StepEnd, StepEvent, spread
from sglang_afd.upstream import quarantine
from sglang_afd.upstream.lane_parts import LaneParts, scheduler_parts
from sglang_afd.upstream.speculation import draft_state_of


class Lane:
    """One lane of a rank: its requests, and what is kept of its launched steps."""

    def __init__(self, index: int, running: Any, parts: LaneParts) -> None:
        self.index = index
        self.running = running
        """Decode lanes: the batch of the lane's requests.  Prefill lane: the extend under way."""
        self.results: deque[tuple[Any, Any]] = deque()
        """Launched steps whose results are not read yet, at most one between turns."""
        self.event: StepEnd | None = None
        """The end of the last launched step."""
        self.read: StepEvent | None = None
        """When the last launched step has read what the scheduler will write to."""
        self.steps = 0
        """Steps launched with requests of this rank's."""
        self._record: tuple[list[Any], int] = ([None, None], 0)
        self._parts = parts

    @contextmanager
    def enter(self, scheduler: Any) -> Iterator[None]:
        """Let the scheduler launch and read steps of this lane within the block."""
        before = scheduler.result_queue, scheduler.batch_record_buf, scheduler.batch_record_ct
        scheduler.result_queue = self.results
        scheduler.batch_record_buf, scheduler.batch_record_ct = self._record
        try:
            with self._parts.in_place(scheduler):
                yield
        finally:
            self._record = scheduler.batch_record_buf, scheduler.batch_record_ct
            (
                scheduler.result_queue,
                scheduler.batch_record_buf,
                scheduler.batch_record_ct,
            ) = before


class Everyone:
    """All lanes' requests, in the place of SGLang's running batch: what its admission and
    preemption, its load reports and its commands look at and change."""

    def __init__(self, lanes: list[Lane], extend: Lane) -> None:
        self._lanes, self._extend = lanes, extend
        self.batch_is_full = False

    @property
    def reqs(self) -> list[Any]:
        """Requests of the decode lanes, then those of the extend under way."""
        found = [req for lane in self._lanes for req in lane.running.reqs]
        return found + self._extend.running.reqs

    @reqs.setter
    def reqs(self, reqs: list[Any]) -> None:
        assert not reqs, "SGLang only ever drops all of them"
        for lane in (*self._lanes, self._extend):
            lane.running.reqs = []

    def batch_size(self) -> int:
        """How many requests there are."""
        return len(self.reqs)

    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.reqs

    def release_req(self, index: int, remaining: int) -> None:
        """Release the KV of request `index` of `reqs`, which is in a decode lane."""
        lane, place = self._place(index)
        lane.running.release_req(place, remaining)

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        """Keep only the requests at `keep_indices` of `reqs`."""
        reqs = self.reqs
        kept = {id(reqs[index]) for index in keep_indices}
        for lane in self._lanes:
            places = [i for i, req in enumerate(lane.running.reqs) if id(req) in kept]
            if len(places) < len(lane.running.reqs):
                lane.running.filter_batch(keep_indices=places)

    def _place(self, index: int) -> tuple[Lane, int]:
        for lane in self._lanes:
            if index < len(lane.running.reqs):
                return lane, index
            index -= len(lane.running.reqs)
        raise IndexError("the request is not in a decode lane")


class Unread:
    """The launched steps whose results are not read yet, in the place of SGLang's last batch: with
    `Everyone`, all requests that hold KV."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes

    @property
    def reqs(self) -> list[Any]:
        """Requests of those steps; of a lane's some may have left its batch already."""
        return [req for lane in self._lanes for batch, _ in lane.results for req in batch.reqs]

    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.reqs


class LaneLoop:
    """The lanes of a rank, and its loop over them."""

    def __init__(
        self, scheduler: Any, context: RankContext, runner_parts: Sequence[dict[str, Any]]
    ) -> None:
        """`runner_parts`: what the model runner has for each decode lane, then for prefills."""
        self._scheduler, self._context = scheduler, context
        *self.lanes, self.prefill = (
            Lane(
                index,
                self._no_requests(),
                LaneParts(scheduler_parts(scheduler, index, context), runner),
            )
            for index, runner in enumerate(runner_parts)
        )
        self.everyone = Everyone(self.lanes, self.prefill)
        self._unread = Unread([*self.lanes, self.prefill])
        scheduler.running_batch, scheduler.last_batch = self.everyone, self._unread
        scheduler.result_queue = deque()
        self._agreed = 0
        """Lanes whose turn all ranks take in this cycle, a bit each."""

    def run(self) -> None:
        """SGLang's event loop."""
        from sglang.srt.environ import envs

        scheduler = self._scheduler
        while not scheduler.gracefully_exit:
            scheduler.ingest_requests()
            if scheduler._engine_paused:
                scheduler._record_scheduler_state_for_paused_engine()
                continue
            quarantine.give_back_ended()
            scheduler.last_batch = self._unread  # a pause or a flush has put nothing there
            busy = self._prefill_turn()
            for lane in self.lanes:
                if self._agreed >> lane.index & 1:
                    busy |= self._decode_turn(lane)
                else:
                    busy |= self._read(lane)
            if not busy:
                scheduler._sched_idled = True
                scheduler.on_idle()
            if envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get():
                scheduler.invariant_checker.self_check_during_busy()

    def drained(self) -> bool:
        """Whether no lane has a result that is not read yet."""
        return not any(lane.results for lane in (*self.lanes, self.prefill))

    def settle(self) -> None:
        """Read the results of all launched steps, waiting for them."""
        for lane in self.lanes:
            self._read(lane)
        self._finish_extend()
        self._scheduler.last_batch = None

    def make_room(self, batch: Any) -> list[Any]:
        """Take requests out of the lanes until `batch`, a lane's, has memory for its next step.

        The requests with the fewest tokens to lose go first, whichever lane they are in, as
        SGLang's retraction has it for its one batch; a prompt that is in chunks loses none.

        Returns:
            The requests taken, without KV, to be queued again.  One request is always left, which
            then has no room if the pool is too small for it alone.
        """
        scheduler = self._scheduler
        self.settle()  # which may end requests; and no result of a request taken may come later
        scheduler.process_pending_chunked_abort()
        for lane in self.lanes:
            lane.running.filter_batch()
        taken: list[Any] = []
        while not batch.check_decode_mem():
            candidates = self.everyone.reqs
            if scheduler.chunked_req is not None:
                candidates = [*candidates, scheduler.chunked_req]
            if len(candidates) == 1:
                break
            victim = candidates[batch._get_decode_retraction_order(candidates)[-1]]
            self._take(victim)
            taken.append(victim)
        return taken

    def _take(self, victim: Any) -> None:
        from sglang.srt.managers.schedule_batch import retract_all

        scheduler = self._scheduler
        if victim is scheduler.chunked_req:
            scheduler.chunked_req = None
        else:
            kept = [i for i, req in enumerate(self.everyone.reqs) if req is not victim]
            self.everyone.filter_batch(keep_indices=kept)
        retract_all(
            reqs=[victim],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )

    def _prefill_turn(self) -> bool:
        """Returns: something ran, or a result was read."""
        lane = self.prefill
        ended = self._has_ended(lane)
        if ended:
            self._finish_extend()
        self._context.lane = lane.index
        self._context.work = sum(
            1 << other.index for other in self.lanes if not other.running.is_empty()
        )
        with lane.enter(self._scheduler):
            under_way = bool(lane.results)
            batch = self._agree(None if under_way else self._next_extend())
            assert self._context.plan is not None, "every rank has just told what it does"
            self._agreed = self._context.plan.work
            if batch is not None and under_way and self._context.leads:
                # another rank's extend, whose blocks have no rows of this one: only counted
                batch = None
                self._scheduler.forward_ct += 1
            launched = self._launch(lane, batch)
            if launched is not None:
                lane.running = launched[0]
                self._sample(lane, *launched)
        return ended or bool(lane.results)

    def _has_ended(self, lane: Lane) -> bool:
        """Whether the extend under way has: with attention TP wait for it, since the ranks of a DP
        rank must decide alike, and see an event pass at different times."""
        if not lane.results or lane.event is None:
            return False
        if self._context.config.attention_tp > 1:
            lane.event.synchronize()
        return lane.event.query()

    def _decode_turn(self, lane: Lane) -> bool:
        """Returns: something ran, or a result was read."""
        self._context.lane = lane.index
        with lane.enter(self._scheduler):
            if lane.read is not None:
                lane.read.wait()
            batch = self._agree(self._next_decode(lane))
            unread = len(lane.results)
            launched = self._launch(lane, batch)
            for _ in range(unread):
                self._read_one(lane)
            if launched is not None:  # a grammar's mask follows from the result read just now
                self._sample(lane, *launched)
        return unread > 0 or launched is not None

    def _next_extend(self) -> Any | None:
        scheduler = self._scheduler
        scheduler.process_pending_chunked_abort()
        chunked = scheduler.chunked_req
        if chunked is not None:
            if chunked.extend_end > chunked.prefix_len:
                scheduler.stash_chunked_request(chunked)
            if not self._has_room_for_chunk(chunked):
                return None
        return scheduler.get_new_batch_prefill(self.everyone).batch_to_run

    def _has_room_for_chunk(self, chunked: Any) -> bool:
        """Whether the next chunk fits, or nobody is left who could make room by ending.

        SGLang's decode stands still while a prompt is in chunks; here lanes go on, and may have
        taken what the prompt was admitted for.
        """
        scheduler = self._scheduler
        if self.everyone.is_empty():
            return True
        left = len(chunked.origin_input_ids) + len(chunked.output_ids) - chunked.extend_end
        chunk = min(left, scheduler.chunked_prefill_size or left)
        return scheduler.token_to_kv_pool_allocator.check_decode_capacity(
            num_tokens=chunk + scheduler.page_size, tree_cache=scheduler.tree_cache
        )

    def _next_decode(self, lane: Lane) -> Any | None:
        before = lane.running.batch_size()
        if not before:
            return None
        batch = None
        lane.running.filter_batch()
        if not lane.running.is_empty():
            batch = self._scheduler.update_running_batch(lane.running)
        if lane.running.batch_size() < before:
            self.everyone.batch_is_full = False
        return None if batch is None or batch.is_empty() else batch

    def _agree(self, batch: Any | None) -> Any | None:
        """Tell all ranks what this one has for the step, and learn what they have.

        Returns:
            What to launch: `batch`, an idle batch if only others have something, None if none has.
        """
        batch = self._scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        self._scheduler.cur_batch_for_debug = batch
        return batch

    def _launch(self, lane: Lane, batch: Any | None) -> tuple[Any, Any] | None:
        """Launch the lane's step, if there is one; returns the batch and its result."""
        from sglang.srt.observability.req_time_stats import set_schedule_time_batch

        scheduler, steps = self._scheduler, self._context.steps
        if batch is None:
            return None
        set_schedule_time_batch(batch)
        if batch.prefix_lens and any(batch.prefix_lens):
            for event in steps.pending(but=lane.index):
                event.wait(scheduler.forward_stream)
        result = scheduler.run_batch(batch)
        lane.event = StepEnd(scheduler.device_module.Event())
        if result.delay_sample_func is None:
            lane.event.record(scheduler.forward_stream)
        lane.read = self._end_of_reads() or lane.event
        steps.launched(lane.index, lane.event)
        lane.steps += bool(batch.reqs)
        lane.results.append((batch.copy(), result))
        return batch, result

    def _sample(self, lane: Lane, batch: Any, result: Any) -> None:
        """Launch the sampling that had to wait: the step, which it writes for, ends with it."""
        self._scheduler.launch_batch_sample_if_needed(result, batch)
        assert lane.event is not None, "the step was launched"
        if not lane.event.recorded:
            lane.event.record(self._scheduler.forward_stream)

    def _end_of_reads(self) -> StepEvent | None:
        """When the step launched last has read the scheduler's tables, if that is known."""
        from sglang.srt.environ import envs

        runner = self._scheduler.model_worker.last_shared_read_runner
        read, runner.shared_read_done_event = runner.shared_read_done_event, None
        return None if envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get() else read

    def _finish_extend(self) -> None:
        """Read the extend's result, and let its requests join the decode lanes."""
        lane = self.prefill
        self._read(lane)
        batch, lane.running = lane.running, self._no_requests()
        going_on = [r for r in batch.reqs if r is not batch.chunked_req and not r.finished()]
        if len(going_on) < len(batch.reqs):
            self.everyone.batch_is_full = False
        sizes = [sum(not r.finished() for r in other.running.reqs) for other in self.lanes]
        chosen = spread(len(going_on), sizes)
        for other in self.lanes:
            joining = [r for r, index in zip(going_on, chosen, strict=True) if index == other.index]
            if not joining:
                continue
            part = self._decoding(joining)
            if other.running.is_empty():
                other.running = part
            else:
                other.running.merge_batch(part)

    def _read(self, lane: Lane) -> bool:
        """Read the lane's results that are left; returns whether there were any."""
        unread = len(lane.results)
        with lane.enter(self._scheduler):
            while lane.results:
                self._read_one(lane)
        return unread > 0

    def _read_one(self, lane: Lane) -> None:
        self._scheduler.process_batch_result(*lane.results.popleft())

    def _decoding(self, reqs: list[Any]) -> Any:
        """A decode batch of requests whose prefill has ended."""
        import torch
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        batch = self._batch_of(reqs)
        # Qwen3.5's positions are made of these, where no request has any too.
        batch.multimodal_inputs = [req.multimodal_inputs for req in reqs]
        slots = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lengths = torch.tensor(
            [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
        )
        batch.req_pool_indices_cpu, batch.req_pool_indices = slots, slots.to(batch.device)
        batch.seq_lens_cpu, batch.seq_lens = lengths, lengths.to(batch.device)
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.spec_info = draft_state_of(batch)
        if batch.return_logprob:
            batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
            batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
        vocabulary = self._scheduler.model_config.vocab_size
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
        return batch

    def _no_requests(self) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        return ScheduleBatch(reqs=[], batch_is_full=False)

    def _batch_of(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        return ScheduleBatch.init_new(
            reqs,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
