"""The engine: a thread that runs steps while there are requests, and sleeps while there are none."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

from draftline.errors import RequestError
from draftline.runtime.core import Emission, EngineCore, Statistics
from draftline.runtime.cost_curve import CostCurve, measure_cost_curve
from draftline.runtime.drafters.building import PLAIN, Speculation
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Request
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.sessions.protocol import Session

__all__ = ["Engine", "Statistics"]


class Engine:
    """Serve requests on one session with in-flight batching.

    ``submit`` and ``cancel`` may be called from any thread, ``Request.on_output`` included. ``on_output`` and the
    request's ``text_stream`` run in the engine's thread, without a lock, and must be quick and must not raise: an
    exception there is a bug that stops the engine, after every request was told so (finish reason ``error``).
    A failing forward only ends the requests that were running. The session belongs to the caller, who closes it after
    the engine.

    Whenever the last request is done, the block pool is proved intact; a violation stops the engine as well.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        block_size: int,
        max_blocks: int,
        prefix_cache: bool,
        vocab_size: int | None = None,
        speculation: Speculation = PLAIN,
    ) -> None:
        """Start the thread. ``vocab_size`` None = token ids of prompts are not checked against the vocabulary.

        An engine with ``auto`` trees first measures what forwards of the target cost, by their number of rows.

        Raises: PipelineError when a size is below 1, or ``max_num_tokens`` below ``max_batch_size``.
        """
        self.limits = EngineLimits(max_batch_size, max_seq_len, max_num_tokens, block_size, max_blocks, vocab_size)
        policy = None
        if speculation.sources:
            measures = speculation.shape.kind == "auto"
            cost = measure_cost_curve(session, self.limits) if measures else CostCurve([1], [1.0])
            is_free = not speculation.keeps_kv
            policy = SpeculationPolicy(speculation.shape, cost, len(speculation.sources), is_free=is_free)
        self._core = EngineCore(session, self.limits, prefix_cache=prefix_cache, speculation=speculation, policy=policy)
        self._snapshot = self._core.statistics()
        self._wakeup = threading.Condition()
        self._commands: list[Sequence | str] = []  # in order: a sequence to add, or the id of a request to cancel
        self._active: dict[str, Sequence] = {}  # those whose last output was not handed out yet
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="draftline-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; its outputs go to ``request.on_output``, the last one with a finish reason.

        Raises: RequestError, and nothing is queued, for a request that can never be served (see ``check_request``),
        an id that is still active, or an engine that was closed or has stopped.
        """
        prompt_ids = check_request(request, self.limits)
        sequence = Sequence(request, prompt_ids, time.time_ns())
        with self._wakeup:
            if self._failure is not None:
                raise RequestError("engine", "must be running", f"stopped by {self._failure!r}", "restart the server")
            if self._is_closing:
                raise RequestError("engine", "must be open", "closed", "start another engine")
            if request.request_id in self._active:
                raise RequestError(
                    "request_id", "must differ from every active request's", request.request_id, "choose another id"
                )
            self._active[request.request_id] = sequence
            self._commands.append(sequence)
            self._wakeup.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request before its next step (finish reason ``cancelled``); False when it is not active."""
        with self._wakeup:
            if request_id not in self._active:
                return False
            self._commands.append(request_id)
            self._wakeup.notify()
            return True

    def statistics(self) -> Statistics:
        """Return the numbers after the latest step; requests submitted since then count as active and waiting."""
        with self._wakeup:
            num_active, snapshot = len(self._active), self._snapshot
        num_running = min(snapshot.num_requests_running, num_active)
        return replace(
            snapshot,
            num_requests_active=num_active,
            num_requests_running=num_running,
            num_requests_waiting=num_active - num_running,
        )

    def close(self) -> None:
        """End outstanding requests as cancelled and stop the thread; closing again does nothing."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as error:  # the thread's boundary: clients must hear of it before it goes up
            self._stop(error)
            raise

    def _serve(self) -> bool:
        """Take the commands that came in, run one step, deliver; False when the engine is closing."""
        core = self._core
        with self._wakeup:
            while core.is_idle and not self._commands and not self._is_closing:
                self._wakeup.wait()
            commands, self._commands = self._commands, []
            is_closing = self._is_closing
        emissions: list[Emission] = []
        for command in commands:
            if isinstance(command, Sequence):
                core.add(command)
            else:
                emissions += core.cancel(command)
        emissions += core.end_all("cancelled") if is_closing else core.step()
        self._deliver(emissions)
        if core.is_idle:
            core.check_integrity()
        return not is_closing

    def _deliver(self, emissions: list[Emission]) -> None:
        """Hand out outputs; every one is, even when a callback raises."""
        with self._wakeup:
            self._snapshot = self._core.statistics()
            for _, output in emissions:
                if output.finish_reason is not None:
                    del self._active[output.request_id]
        with ExitStack() as stack:
            for sequence, output in reversed(emissions):  # an ExitStack runs the last callback first
                stack.callback(sequence.request.on_output, output)

    def _stop(self, error: BaseException) -> None:
        with self._wakeup:
            self._failure = error
            sequences = list(self._active.values())
        self._deliver([(sequence, sequence.end("error", f"engine stopped: {error!r}")) for sequence in sequences])
