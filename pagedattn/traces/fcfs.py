"""First come, first served: a whole trace through one pool of KV slots.

Time goes in steps. In one step, in this order:

1. Decode: every running request appends one token, the oldest first. Under paging this may need a
   block. If none is free, the youngest running request is preempted: it loses its blocks and waits
   again, at the front of the queue. It keeps its tokens; their K and V are computed anew later.
2. Admit: requests are taken from the front of the queue while they fit, and none overtakes. All
   tokens that they have are stored at once. A step that preempted admits nobody.
3. Measure: running requests, used slots, reserved slots.
4. Finish: whoever has all its output is freed.

Arrival times are ignored: at step 0 the whole trace waits. Old and young are meant by admission.

The order of service and the preemption with recomputation are those of the vLLM paper (Kwon et al.,
SOSP 2023, section 4.5).
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedattn.traces.policies import Policy, Running
from pagedattn.traces.recorded import Request


@dataclass(frozen=True)
class Metrics:
    """One run in figures. Sums and means are over all steps, or over the saturated ones.

    A step is saturated while somebody waits: only then is the pool asked for all it can give. The
    saturated figures are nan if everything fitted at once.
    """

    num_steps: int
    num_preemptions: int
    peak_running: int
    mean_used: float  # slots that hold a token
    mean_reserved: float  # slots that nobody else can take
    used_of_reserved: float  # sum of used / sum of reserved
    saturated_used_of_reserved: float
    saturated_used_of_pool: float  # sum of used / (num_slots * saturated steps)
    saturated_mean_running: float


def replay(requests: Sequence[Request], policy: Policy) -> Metrics:
    """Run the requests through an empty pool, first come first served, to the end.

    Raises ValueError before the first step if there is no request, or one that can never run.
    """
    if not requests:
        raise ValueError("the trace is empty")
    for request in requests:
        policy.check(request)

    waiting = deque((request, request.input_length) for request in requests)
    running: list[Running] = []  # in order of admission
    finishing: defaultdict[int, list[Running]] = defaultdict(list)  # by the step of the last token
    history = array("q")  # four numbers a step
    step = used = num_preemptions = 0

    while waiting or running:
        preempted = False
        # A request is preempted before its turn, or at its turn: it never appends in this step. So
        # preempting until the rest fits leaves the same requests as going through them in order.
        while not policy.grow(step):
            preempted = True
            victim = running.pop()
            num_tokens = step - 1 - victim.origin
            policy.release(victim, num_tokens)
            finishing[victim.origin + victim.request.total_length].remove(victim)
            waiting.appendleft((victim.request, num_tokens))
            used -= num_tokens
            num_preemptions += 1
        used += len(running)

        while waiting and not preempted:
            request, num_tokens = waiting[0]
            admitted = Running(request, step - num_tokens)
            if not policy.admit(admitted, num_tokens):
                break
            waiting.popleft()
            running.append(admitted)
            finishing[admitted.origin + request.total_length].append(admitted)
            used += num_tokens

        history.extend((len(running), used, policy.reserved, len(waiting)))

        for finished in finishing.pop(step, ()):
            policy.release(finished, finished.request.total_length)
            running.remove(finished)
            used -= finished.request.total_length
        step += 1

    return _metrics(np.asarray(history).reshape(-1, 4), policy.num_slots, num_preemptions)


def _metrics(history: np.ndarray, num_slots: int, num_preemptions: int) -> Metrics:
    # history [num_steps, 4]: running, used, reserved, waiting; the whole and its saturated steps
    saturated = history[history[:, 3] > 0]
    _, used, reserved, _ = history.sum(axis=0)
    sat_running, sat_used, sat_reserved, _ = saturated.sum(axis=0)
    sat_steps = len(saturated) or np.nan
    return Metrics(
        num_steps=len(history),
        num_preemptions=num_preemptions,
        peak_running=int(history[:, 0].max()),
        mean_used=float(used / len(history)),
        mean_reserved=float(reserved / len(history)),
        used_of_reserved=float(used / reserved),
        saturated_used_of_reserved=float(sat_used / (sat_reserved or np.nan)),
        saturated_used_of_pool=float(sat_used / (num_slots * sat_steps)),
        saturated_mean_running=float(sat_running / sat_steps),
    )
