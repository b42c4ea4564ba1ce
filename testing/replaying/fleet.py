"""A fleet on a virtual clock: replicas with service curves, and the real routing and scaling.

Only events cost time: a turn that is asked, a reply that ends, a replica that has loaded. A replica
runs `at_once` requests, whose frames come as fast as its curves say for so many, and for the mean
rows that they had to prefill. It holds the rows of its last `slots` conversations: a turn prefills
what is new where its conversation is held, and otherwise all but the system prompt.
"""

import heapq
import itertools
import math
import random
import string
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from qwen3_omni_neuron.serving.fleet.scaling import (
    AT_ONCE,
    FIRST_AUDIO,
    REPLIES,
    REQUESTS,
    SERVICE,
    SLOTS,
    WINDOW_S,
    FirstAudioPolicy,
)
from testing.replaying.curves import FRAME_S, RANKS, ServiceCurves
from testing.replaying.load import SYSTEM_ROWS, RequestLengths

AUDIO_ROWS_A_S, TEMPLATE_ROWS = 13, 16
STAGE_THREADS = 3  # thinker, talker, vocoder
# Waits before Ray's router tries again, while all replicas that may take a request are busy.
BACKOFF_S, LONGEST_BACKOFF_S = 0.025, 0.5
DECIDE_S, LOOK_BACK = 10.0, 3  # Ray's figures come every 10 s, and count for 30 s


class Ring(Protocol):
    """Ranking of replicas by a session's key, like the router's ring."""

    def update(self, names: Iterable[str]) -> None:
        """Set the replicas."""

    def rank(self, key: str) -> Sequence[str]:
        """Return the replicas that are tried in turn."""


@dataclass(frozen=True)
class Plan:
    """Size, routing and scaling of a fleet.

    at_once, queued: requests that a replica runs, and that wait in it (`max_ongoing_requests` is
    both together). slots: number of prompts whose rows a replica holds. affinity: a turn goes where
    the ring says, or if all those are busy to the emptier of any two replicas, like AffinityRouter;
    otherwise always to the emptier of two, like Ray's default router. replicas: number at the
    start. policy: None for a fixed fleet; most: the most replicas. settle: applies Ray's delays to
    the policy's number: (wanted, target, now). load_s: time to load a replica. cores: CPU cores
    that all replicas share; 0: each has its own. patience_s: wait after which a request is refused.
    takes is refused.
    """

    at_once: int
    _: KW_ONLY
    queued: int = 0
    slots: int = 8
    affinity: bool = True
    replicas: int = 1
    policy: FirstAudioPolicy | None = None
    most: int = 1
    settle: Callable[[int, int, float], int] = lambda wanted, target, now: wanted
    load_s: float = 300.0
    cores: float = 0.0
    patience_s: float = 60.0


@dataclass(frozen=True)
class Talk:
    """Lengths and pauses of conversations.

    turns: mean number of turns. think_s: mean time from a reply's last sample to the next question.
    context_rows: a conversation ends when its prompt is longer.
    """

    lengths: Sequence[RequestLengths]
    turns: float = 5.0
    think_s: float = 8.0
    context_rows: int = 8192


@dataclass
class Outcome:
    """Counts of a simulation, from `since_s` on.

    first_audio_s: each reply's time to first audio since its question, including waiting. waited:
    requests that no replica could take at once; refused: requests that none took. rows: rows of all
    prompts; held: rows of them that the replica held; fresh: rows that were new to the fleet.
    replica_s: time of all replicas, including the time of `loads`.
    """

    since_s: float
    first_audio_s: "array[float]" = field(default_factory=lambda: array("d"))
    waited: int = 0
    refused: int = 0
    speech_s: float = 0.0
    rows: int = 0
    held: int = 0
    fresh: int = 0
    replica_s: float = 0.0
    loads: int = 0
    most_replicas: int = 0
    seconds: float = 0.0

    def quantile_s(self, rank: float) -> float:
        """Return a quantile of the time to first audio."""
        if not self.first_audio_s:
            return math.nan
        return float(np.quantile(np.frombuffer(self.first_audio_s), rank))


class Conversation:
    """One conversation: the rows of its prompt so far, and the questions still to come."""

    __slots__ = ("key", "questions", "rows")

    def __init__(self, key: str, questions: int):
        self.key, self.questions, self.rows = key, questions, SYSTEM_ROWS


class Question:
    """One request. rows: rows that its replica prefills."""

    __slots__ = ("asked_s", "began_s", "conversation", "first_s", "lengths", "rows", "tries")

    def __init__(self, conversation: Conversation, lengths: RequestLengths, asked_s: float):
        self.conversation, self.lengths, self.asked_s = conversation, lengths, asked_s
        self.tries, self.rows, self.began_s, self.first_s = 0, 0, 0.0, 0.0

    @property
    def prompt_rows(self) -> int:
        """Number of rows of its prompt."""
        asked = round(AUDIO_ROWS_A_S * self.lengths.audio_s) + TEMPLATE_ROWS
        return self.conversation.rows + asked


class Replica:
    """One replica. frames: frames that a request running since the replica's start would have.

    running: requests by the value of `frames` at which each ends. held: rows by conversation, the
    last used at the end. version: version of the event that ends its next request.
    """

    def __init__(self, name: str, began_s: float):
        self.name, self.began_s = name, began_s
        self.ready = self.leaving = False
        self.frames, self.pace, self.at_s = 0.0, 0.0, began_s
        self.running: list[tuple[float, int, Question]] = []
        self.waiting: deque[Question] = deque()
        self.rows = 0
        self.held: OrderedDict[str, int] = OrderedDict()
        self.version = 0

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Give its requests the frames of the time until now."""
        self.frames += (now - self.at_s) * self.pace
        self.at_s = now


class Fleet:
    """A simulation: make one, and run `day` or `closed` once."""

    def __init__(
        self,
        plan: Plan,
        curves: ServiceCurves,
        talk: Talk,
        ring: Ring,
        seed: int = 0,
        since_s: float = 0.0,
    ):
        self._plan, self._curves, self._talk, self._ring = plan, _Cached(curves), talk, ring
        self._dice = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.now = 0.0
        self._replicas: dict[str, Replica] = {}
        self._ready: list[Replica] = []
        self._target = plan.replicas
        self._requests, self._request_s = 0, 0.0  # now, and their integral over time
        self._counted_s = 0.0
        self._looks = deque([(0.0, 0.0)], maxlen=LOOK_BACK + 1)
        self._recent: deque[tuple[float, float, float, int]] = deque()
        self._closed = False
        self.outcome = Outcome(since_s)
        self._set_ready([self._add() for _ in range(plan.replicas)])

    def day(self, rate: Callable[[float], float], most_rate: float, seconds: float) -> Outcome:
        """Run conversations, of which rate(t), at most most_rate, begin each second."""
        self._begin(rate, most_rate)
        return self._run(seconds)

    def closed(self, clients: int, seconds: float) -> Outcome:
        """Run clients that each ask again, in a new conversation, when a reply has ended."""
        self._closed = True
        for _ in range(clients):
            self._ask(self._conversation())
        return self._run(seconds)

    def _run(self, seconds: float) -> Outcome:
        if self._plan.policy is not None:
            self._after(DECIDE_S, self._decide)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        self.now = seconds
        for replica in list(self._replicas.values()):
            self._stop(replica)
        self.outcome.seconds = seconds - self.outcome.since_s
        return self.outcome

    def _after(self, seconds: float, event: Callable[..., None], *arguments: Any) -> None:
        entry = (self.now + seconds, next(self._order), event, arguments)
        heapq.heappush(self._events, entry)

    # Conversations

    def _begin(self, rate: Callable[[float], float], most_rate: float) -> None:
        self._after(self._dice.expovariate(most_rate), self._begin, rate, most_rate)
        if self._dice.random() * most_rate < rate(self.now):
            self._ask(self._conversation())

    def _conversation(self) -> Conversation:
        turns = self._talk.turns
        questions = 1
        if turns > 1:  # geometric: each turn may be the last
            questions += int(math.log(1 - self._dice.random()) / math.log(1 - 1 / turns))
        return Conversation(f"{self._dice.getrandbits(64):x}", questions)

    def _ask(self, conversation: Conversation) -> None:
        lengths = self._dice.choice(self._talk.lengths)
        self._count_requests(1)
        self._route(Question(conversation, lengths, self.now))

    def _route(self, question: Question) -> None:
        replica = self._choose(question)
        if replica is not None:
            if len(replica.running) < self._plan.at_once:
                self._start(replica, question)
            else:
                replica.waiting.append(question)
            return
        counts = question.asked_s >= self.outcome.since_s
        if self.now - question.asked_s > self._plan.patience_s:
            self.outcome.refused += counts
            self._count_requests(-1)
            return
        self.outcome.waited += counts and not question.tries
        wait_s = min(BACKOFF_S * 2**question.tries, LONGEST_BACKOFF_S)
        question.tries += 1
        self._after(wait_s, self._route, question)

    def _choose(self, question: Question) -> Replica | None:
        most, ready = self._plan.at_once + self._plan.queued, self._ready
        if self._plan.affinity and ready:
            for name in self._ring.rank(question.conversation.key):
                if self._replicas[name].requests < most:
                    return self._replicas[name]
        pair = self._dice.sample(ready, min(2, len(ready)))
        best = min(pair, key=lambda replica: replica.requests, default=None)
        return best if best is not None and best.requests < most else None

    # Replies

    def _start(self, replica: Replica, question: Question) -> None:
        conversation, prompt_rows = question.conversation, question.prompt_rows
        own_rows = replica.held.pop(conversation.key, 0)
        held = own_rows or (SYSTEM_ROWS if replica.held else 0)
        fresh = prompt_rows - conversation.rows
        question.rows, question.began_s = prompt_rows - held, self.now
        replica.advance(self.now)
        count = len(replica.running) + 1
        replica.rows += question.rows
        first_s = self._curves.first_audio_s(question.rows, count, self._dice.random())
        question.first_s = first_s * self._wait_for_cores(replica, count)
        frame_s = self._curves.frame_s(replica.rows / count, count)
        ends = replica.frames + first_s / frame_s + question.lengths.frames
        heapq.heappush(replica.running, (ends, next(self._order), question))
        conversation.rows = prompt_rows + question.lengths.text_tokens
        replica.held[conversation.key] = conversation.rows
        if len(replica.held) > self._plan.slots:
            replica.held.popitem(last=False)
        self._pace(replica)
        if question.asked_s >= self.outcome.since_s:
            outcome = self.outcome
            outcome.first_audio_s.append(self.now - question.asked_s + question.first_s)
            outcome.speech_s += FRAME_S * question.lengths.frames
            outcome.rows += prompt_rows
            outcome.held += held
            outcome.fresh += fresh

    def _pace(self, replica: Replica) -> None:
        """Set the pace of a replica's requests, or that of all replicas if they share a CPU."""
        changed = list(self._ready) if self._plan.cores else [replica]
        for other in changed:
            other.advance(self.now)
            count = len(other.running)
            other.version += 1
            if not count:
                other.pace = 0.0
                continue
            frame_s = self._curves.frame_s(other.rows / count, count)
            other.pace = self._share(other, count) / frame_s
            left = max(0.0, other.running[0][0] - other.frames)
            self._after(left / other.pace, self._end, other, other.version)

    def _share(self, replica: Replica, count: int) -> float:
        """Return the share of its full speed that a replica with this many requests has."""
        if not self._plan.cores:
            return 1.0
        others = sum(self._curves.cores(len(r.running)) for r in self._ready if r is not replica)
        return min(1.0, self._plan.cores / (others + self._curves.cores(count)))

    def _wait_for_cores(self, replica: Replica, count: int) -> float:
        """Return the factor by which a first sample takes longer if all replicas share a CPU.

        A new request waits for a core among the threads that have work, including those of its own
        replica: a stage's thread has work unless none of the replica's requests needs it.
        """
        if not self._plan.cores:
            return 1.0
        idle = 1 - min(1.0, self._curves.cores(1) / STAGE_THREADS)
        counts = [count if r is replica else len(r.running) for r in self._ready]
        busy = sum(STAGE_THREADS * (1 - idle**n) for n in counts)
        return max(1.0, busy / self._plan.cores)

    def _end(self, replica: Replica, version: int) -> None:
        if version != replica.version:
            return  # requests began or ended since
        replica.advance(self.now)
        _, _, question = heapq.heappop(replica.running)
        replica.rows -= question.rows
        at_once = 1 + len(replica.running)
        if replica.waiting:
            self._start(replica, replica.waiting.popleft())
        else:
            self._pace(replica)
        if replica.leaving and not replica.running:
            self._stop(replica)
        self._count_requests(-1)
        service_s = self.now - question.began_s
        self._recent.append((self.now, service_s, question.first_s, at_once))
        conversation = question.conversation
        conversation.questions -= 1
        if self._closed:
            self._ask(self._conversation())
        elif conversation.questions and conversation.rows < self._talk.context_rows:
            # The next question comes after the reply was played, which begins at its first sample.
            heard_s = question.first_s + FRAME_S * question.lengths.frames
            heard_s = max(0.0, question.began_s + heard_s - self.now)
            think_s = self._dice.expovariate(1 / self._talk.think_s)
            self._after(heard_s + think_s, self._ask, conversation)

    # Replicas

    def _add(self) -> Replica:
        name = "".join(self._dice.choices(string.ascii_lowercase + string.digits, k=8))
        replica = self._replicas[name] = Replica(name, self.now)
        return replica

    def _loaded(self, replica: Replica) -> None:
        if replica.name in self._replicas:  # else it was stopped while it loaded
            replica.at_s = self.now
            self._set_ready([*self._ready, replica])

    def _set_ready(self, ready: list[Replica]) -> None:
        self._ready = ready
        for replica in ready:
            replica.ready = True
        self._ring.update([replica.name for replica in ready])
        self.outcome.most_replicas = max(self.outcome.most_replicas, len(ready))

    def _stop(self, replica: Replica) -> None:
        since_s = max(replica.began_s, self.outcome.since_s)
        self.outcome.replica_s += max(0.0, self.now - since_s)
        del self._replicas[replica.name]

    def _decide(self) -> None:
        self._after(DECIDE_S, self._decide)
        self._count_requests(0)
        since_s, request_s = self._looks[0]
        self._looks.append((self.now, self._request_s))
        while self._recent and self._recent[0][0] < self.now - WINDOW_S:
            self._recent.popleft()
        requests = (self._request_s - request_s) / (self.now - since_s)
        figures = {SLOTS: {"all": float(self._plan.at_once)}, REQUESTS: {"all": requests}}
        if self._recent:
            count = len(self._recent)
            _, service_s, first_s, at_once = map(sum, zip(*self._recent, strict=True))
            figures[REPLIES] = {"all": count / min(self.now, WINDOW_S)}
            figures[SERVICE] = {"all": service_s / count}
            figures[FIRST_AUDIO] = {"all": first_s / count}
            figures[AT_ONCE] = {"all": at_once / count}
        context = SimpleNamespace(
            aggregated_metrics=figures, total_queued_requests=0.0, target_num_replicas=self._target
        )
        assert self._plan.policy is not None
        wanted, _ = self._plan.policy(context)
        wanted = max(1, min(self._plan.most, wanted))
        self._target = self._plan.settle(wanted, self._target, self.now)
        self._scale()

    def _scale(self) -> None:
        """Load or stop replicas until their number is right; loading ones stop first."""
        staying = [replica for replica in self._replicas.values() if not replica.leaving]
        for _ in range(self._target - len(staying)):
            self.outcome.loads += 1
            self._after(self._plan.load_s, self._loaded, self._add())
        staying.sort(key=lambda replica: (replica.ready, len(replica.running)))
        for replica in staying[: max(0, len(staying) - self._target)]:
            replica.leaving = True
            if replica.ready:
                self._set_ready([other for other in self._ready if other is not replica])
            if not replica.running:
                self._stop(replica)

    def _count_requests(self, more: int) -> None:
        self._request_s += self._requests * (self.now - self._counted_s)
        self._requests, self._counted_s = self._requests + more, self.now


class _Cached:
    """Curves at steps of rows, each computed once."""

    ROWS = 32

    def __init__(self, curves: ServiceCurves):
        self._curves = curves
        self._first_s: dict[tuple[int, int], list[float]] = {}
        self._frame_s: dict[tuple[int, int], float] = {}
        self._cores: dict[int, float] = {0: 0.0}

    def first_audio_s(self, rows: float, at_once: int, rank: float) -> float:
        """Return the time to first audio at a rank of at least 0 and below 1."""
        key = (int(rows) // self.ROWS, at_once)
        if key not in self._first_s:
            rows = (key[0] + 0.5) * self.ROWS
            self._first_s[key] = self._curves.first_audio_of(rows, at_once).tolist()
        found, at = self._first_s[key], rank * (len(RANKS) - 1)
        i = int(at)
        return found[i] + (at - i) * (found[i + 1] - found[i])

    def frame_s(self, rows: float, at_once: int) -> float:
        """Return the time from one frame to the next."""
        key = (int(rows) // self.ROWS, at_once)
        if key not in self._frame_s:
            self._frame_s[key] = self._curves.frame_of((key[0] + 0.5) * self.ROWS, at_once)
        return self._frame_s[key]

    def cores(self, at_once: int) -> float:
        """Return the cores that this many requests keep busy."""
        if at_once not in self._cores:
            self._cores[at_once] = self._curves.cores_of(at_once)
        return self._cores[at_once]
