"""Breadth-first search through every reachable state of a model, shared by all models here.

A model is an object with
  first()         its first state, a hashable value;
  steps(state)    every step that can be taken: (words, is_fault, next state);
  wrong(state)    what is wrong with a state, or None;
  tidy(state)     the same state in its one spelling (what no later step can see is dropped);
  at_rest(state)  whether all work is done.

Two questions are asked. Safety: is any state wrong? Since the search is breadth first, the
counterexample is one of the shortest. Progress: can every state still come to rest with no further
fault? (Money that is stuck for ever is found by this one.)

Deliberately absent: probabilities, fairness, real time, and any reduction that would need a proof."""

import gc
import sys
import time
from array import array
from collections import deque
from typing import NamedTuple


class Refused(Exception):
    """A step that the real system would refuse for ever, such as a charge against a CHECK."""


class Result(NamedTuple):
    states: int
    seconds: float
    wrong: str | None  # None: the model holds
    trace: list[str]   # the steps that lead there

    @property
    def holds(self):
        return self.wrong is None


def explore(model):
    gc.disable()  # millions of tuples, no cycles
    began = time.process_time()
    first = model.tidy(model.first())
    number = {first: 0}
    parent, how = array("l", [-1]), [""]
    sources, targets = array("l"), array("l")  # steps that are no faults
    at_rest = array("l", [0] if model.at_rest(first) else [])

    def result(wrong, at=None, last=None):
        trace = [last] if last else []
        while at is not None and parent[at] >= 0:
            trace.append(how[at])
            at = parent[at]
        return Result(len(number), time.process_time() - began, wrong, trace[::-1])

    queue = deque([first])
    here = -1
    while queue:
        state = queue.popleft()
        here += 1  # states leave the queue in the order of their numbers
        try:
            for words, is_fault, after in model.steps(state):
                there = number.get(after)
                if there is None:
                    wrong = model.wrong(after)
                    if wrong:
                        return result(wrong, here, words)
                    after = model.tidy(after)
                    there = number.get(after)
                if there is None:
                    there = number[after] = len(number)
                    parent.append(here)
                    how.append(sys.intern(words))
                    queue.append(after)
                    if model.at_rest(after):
                        at_rest.append(there)
                if not is_fault:
                    sources.append(here)
                    targets.append(there)
        except Refused as refused:
            return result(refused.args[0], here, refused.args[1])
    stuck = first_stuck(len(number), sources, targets, at_rest)
    if stuck is not None:
        return result("never comes to rest", stuck)
    return result(None)


def first_stuck(count, sources, targets, at_rest):
    """The nearest state from which no state at rest can be reached, if there is one."""
    begins = array("l", bytes(8 * (count + 1)))
    for target in targets:
        begins[target + 1] += 1
    for i in range(count):
        begins[i + 1] += begins[i]
    fill, before = array("l", begins), array("l", bytes(8 * len(sources)))
    for source, target in zip(sources, targets):
        before[fill[target]] = source
        fill[target] += 1
    good = bytearray(count)
    work = list(at_rest)
    for state in work:
        good[state] = 1
    while work:
        state = work.pop()
        for source in before[begins[state]:begins[state + 1]]:
            if not good[source]:
                good[source] = 1
                work.append(source)
    missing = good.find(0)
    return None if missing < 0 else missing
