"""The fleet's money protocol: Postgres is the authority, Redis spends leased pools under an epoch.

The first prototype of this check, kept running so that the fleet can be built on it and extend it.

WHAT IS MODELLED. One account with a balance of 2; three calls with holds of 2, 1 and 1 that cost 1 each:
one more than there is money for. Postgres with a pool per epoch (amount, consumed, and whether it is
open, frozen or closed); Redis with the pool of its epoch, the holds and the outbox, which all may be lost or
come back older; one gateway with its journal. Both ways from a settle to Postgres are there, the journal and
the outbox, in any order and repeated. Faults: the gateway dies, Redis loses all, a lagging replica takes over,
the gateway's machine is lost with its disk.

WHAT MUST HOLD. Delivered cost never exceeds the balance; Postgres never goes negative and its CHECKs never
refuse a real charge; when nothing but faults can happen any more, the ledger is what was delivered,
unless a disk was lost.

WHAT IS DELIBERATELY ABSENT. Several nodes, local tranches, progress, deadlines and the reaper, a hold whose
answer was lost, and the rule that frees a frozen pool down to what nodes report as open (design 5.2). The
fleet's own issue adds them here first.
"""

from typing import NamedTuple

BALANCE = 2
TRANCHE = 1
HOLDS = (2, 1, 1)
COSTS = (1, 1, 1)
CALLS = range(len(HOLDS))

IDLE, HELD, SENT, DONE = range(4)    # a call in the gateway's memory
OPEN, FROZEN, CLOSED = range(3)      # a pool in Postgres
HOLD, SETTLED, VOID = "H", "S", "V"  # records of the journal


class Rules(NamedTuple):
    """The protocol's rules; a variant breaks one."""

    escrow: bool = True         # Redis spends only what Postgres has leased to it
    epoch_fence: bool = True    # a Redis that lost data gets a new epoch
    drain_before_close: bool = True
    late_posting: bool = True   # a charge on a closed pool takes free money or is written off
    journal: bool = True
    suspense: bool = True       # a pool whose debts went with a disk is not closed


class Bounds(NamedTuple):
    faults: int = 0


class Pool(NamedTuple):
    epoch: int
    amount: int
    consumed: int = 0
    stage: int = OPEN


class Redis(NamedTuple):
    epoch: int
    free: int
    leased: int
    holds: tuple = ()     # ids
    outbox: tuple = ()    # (id, epoch)
    replica: tuple | None = None  # (free, leased, holds, outbox) at some earlier moment


class Gateway(NamedTuple):
    up: bool = True
    phases: tuple = (IDLE,) * len(HOLDS)
    epochs: tuple = (0,) * len(HOLDS)  # each call's hold was placed under this


class State(NamedTuple):
    posted: int
    pools: tuple
    booked: frozenset
    redis: Redis
    gateway: Gateway
    journal: frozenset  # (record, id, epoch)
    delivered: frozenset
    used: frozenset     # hold ids are never used again
    suspect: frozenset  # epochs whose debts are unknown
    faults: int
    disk_lost: bool = False
    refused: bool = False
    redis_lost: bool = False


def put(values, i, value):
    return values[:i] + (value,) + values[i + 1:]


def free(state):
    return state.posted - sum(p.amount - p.consumed for p in state.pools if p.stage != CLOSED)


def pool_of(state, epoch):
    return next((pool for pool in state.pools if pool.epoch == epoch), None)


def with_pool(state, epoch, **change):
    pools = tuple(pool._replace(**change) if pool.epoch == epoch else pool for pool in state.pools)
    return state._replace(pools=pools)


class Fleet:
    def __init__(self, rules=Rules(), bounds=Bounds()):
        self.rules, self.bounds = rules, bounds

    def first(self):
        whole = 0 if self.rules.escrow else BALANCE
        none = frozenset()
        return State(BALANCE, (), none, Redis(1, whole, whole), Gateway(), none, none, none, none,
                     self.bounds.faults)

    def steps(self, state):
        if self.rules.escrow:
            yield from self.lease(state)
            yield from self.close(state)
        for i in CALLS:
            yield from self.call(state, i)
        yield from self.post(state)
        yield from self.recover(state)
        yield from self.faults(state)

    def lease(self, state):
        redis, pool = state.redis, pool_of(state, state.redis.epoch)
        is_open = pool is None or pool.stage == OPEN
        if free(state) > 0 and is_open and state.gateway.up:
            more = min(TRANCHE, free(state))
            if pool:
                after = with_pool(state, redis.epoch, amount=pool.amount + more)
            else:
                after = state._replace(pools=tuple(sorted(state.pools + (Pool(redis.epoch, more),))))
            yield f"lease {more}", False, after
        if pool and is_open and pool.amount > redis.leased and state.gateway.up:
            # The total is installed, not the difference: anybody may repeat it.
            total = redis._replace(free=redis.free + pool.amount - redis.leased, leased=pool.amount)
            yield f"install {pool.amount}", False, state._replace(redis=total)

    def close(self, state):
        """Pools of epochs that are over are frozen, then closed when nothing can be posted on them."""
        for pool in state.pools:
            if pool.epoch != state.redis.epoch and pool.stage == OPEN:
                yield f"freeze pool {pool.epoch}", False, with_pool(state, pool.epoch, stage=FROZEN)
            if pool.stage == FROZEN and (not self.rules.drain_before_close or self.drained(state, pool.epoch)):
                yield f"close pool {pool.epoch}", False, with_pool(state, pool.epoch, stage=CLOSED)

    def drained(self, state, epoch):
        gateway, journal = state.gateway, state.journal
        in_journal = any(kind == HOLD and e == epoch and i not in state.booked and (VOID, i, e) not in journal
                         for kind, i, e in journal)
        in_memory = any(gateway.epochs[i] == epoch and gateway.phases[i] in (HELD, SENT) for i in CALLS)
        in_outbox = any(e == epoch and i not in state.booked for i, e in state.redis.outbox)
        suspect = epoch in state.suspect and self.rules.suspense
        return not (in_journal or in_memory or in_outbox or suspect)

    def call(self, state, i):
        redis, gateway = state.redis, state.gateway
        phase, epoch = gateway.phases[i], gateway.epochs[i]
        if not gateway.up:
            return
        moved = gateway._replace(phases=put(gateway.phases, i, min(phase + 1, DONE)))
        if phase == IDLE and i not in state.used and redis.free >= HOLDS[i]:
            held = redis._replace(free=redis.free - HOLDS[i], holds=tuple(sorted(redis.holds + (i,))))
            moved = moved._replace(epochs=put(gateway.epochs, i, redis.epoch))
            yield f"hold {i}", False, self.noted(state, HOLD, i, redis.epoch)._replace(
                redis=held, gateway=moved, used=state.used | {i})
        if phase == HELD:
            yield f"deliver {i}", False, self.noted(state, SETTLED, i, epoch)._replace(
                gateway=moved, delivered=state.delivered | {i})
        if phase == SENT and i in redis.holds and epoch == redis.epoch:
            yield f"settle {i}", False, state._replace(redis=self.settled(redis, i), gateway=moved)
        elif phase == SENT:
            yield f"settle {i} is stale", False, state._replace(gateway=moved)

    def noted(self, state, kind, i, epoch):
        return state._replace(journal=state.journal | {(kind, i, epoch)}) if self.rules.journal else state

    def settled(self, redis, i):
        return redis._replace(
            free=redis.free + HOLDS[i] - COSTS[i],
            holds=tuple(held for held in redis.holds if held != i),
            outbox=redis.outbox + ((i, redis.epoch),))

    def post(self, state):
        """Two writers, the gateway from its journal and the consumer of the outbox."""
        gateway, redis = state.gateway, state.redis
        for kind, i, epoch in sorted(state.journal):
            if kind == SETTLED and gateway.up and i not in state.booked and gateway.phases[i] in (DONE, IDLE):
                yield from self.book(state, i, epoch, "journal")
        for i, epoch in redis.outbox:
            if i in state.booked:
                rest = tuple(entry for entry in redis.outbox if entry != (i, epoch))
                yield f"acknowledge {i}", False, state._replace(redis=redis._replace(outbox=rest))
            else:
                yield from self.book(state, i, epoch, "outbox")

    def book(self, state, i, epoch, writer):
        words = f"post {i} from the {writer}"
        pool, booked, cost = pool_of(state, epoch), state.booked | {i}, COSTS[i]
        if not self.rules.escrow:
            yield words, False, state._replace(posted=state.posted - cost, booked=booked)
        elif pool is None:
            return
        elif pool.stage == CLOSED and self.rules.late_posting:
            paid = cost if free(state) >= cost else 0  # or it is written off
            yield f"{words}, late", False, state._replace(posted=state.posted - paid, booked=booked)
        elif pool.consumed + cost > pool.amount or state.posted < cost:
            yield words, False, state._replace(refused=True)
        else:
            yield words, False, with_pool(state, epoch, consumed=pool.consumed + cost)._replace(
                posted=state.posted - cost, booked=booked)

    def recover(self, state):
        """What a gateway that was restarted does with its journal."""
        redis, gateway, journal = state.redis, state.gateway, state.journal
        if not gateway.up:
            yield "the gateway restarts", False, state._replace(gateway=gateway._replace(up=True))
            return
        for kind, i, epoch in sorted(journal):
            if gateway.phases[i] != IDLE:
                continue
            here = i in redis.holds and epoch == redis.epoch
            ended = (SETTLED, i, epoch) in journal or (VOID, i, epoch) in journal
            if kind == HOLD and not ended and i not in state.delivered:
                back = redis._replace(
                    free=redis.free + HOLDS[i],
                    holds=tuple(held for held in redis.holds if held != i)) if here else redis
                yield f"void {i}", False, state._replace(journal=journal | {(VOID, i, epoch)}, redis=back)
            if kind == SETTLED and here:
                yield f"settle {i} from the journal", False, state._replace(redis=self.settled(redis, i))

    def faults(self, state):
        redis, gateway = state.redis, state.gateway
        fenced = self.rules.epoch_fence and self.rules.escrow
        epoch = redis.epoch + fenced
        if state.faults:
            left = state._replace(faults=state.faults - 1)
            dead = gateway._replace(up=False, phases=(IDLE,) * len(HOLDS))
            if gateway.up:
                yield "KILL the gateway", True, left._replace(gateway=dead)
                unknown = state.suspect | {pool.epoch for pool in state.pools if pool.stage != CLOSED}
                yield "LOSE the gateway's disk", True, left._replace(
                    gateway=dead, journal=frozenset(), suspect=unknown, disk_lost=True)
            whole = 0 if self.rules.escrow else state.posted
            yield "LOSE Redis", True, left._replace(redis=Redis(epoch, whole, whole), redis_lost=True)
            if redis.replica:
                old_free, leased, holds, outbox = redis.replica
                old = Redis(epoch, 0, 0, (), outbox) if fenced else Redis(epoch, old_free, leased, holds, outbox)
                yield "FAIL OVER to a lagging replica", True, left._replace(redis=old, redis_lost=True)
        if redis.replica is None and self.bounds.faults and not state.redis_lost:
            copy = (redis.free, redis.leased, redis.holds, redis.outbox)
            yield "the replica copies", True, state._replace(redis=redis._replace(replica=copy))

    def wrong(self, state):
        spent = sum(COSTS[i] for i in state.delivered)
        if spent > BALANCE:
            return f"{spent} delivered on a balance of {BALANCE}"
        if state.refused:
            return "Postgres' CHECK refuses a charge for ever"
        if self.rules.escrow and (state.posted < 0 or free(state) < 0):
            return f"balance {state.posted}, of which {free(state)} free"
        charged = BALANCE - state.posted
        if (charged > spent or (charged < spent and not state.disk_lost)) and self.at_rest(state):
            return f"{spent} delivered, {charged} charged for ever"
        return None

    def at_rest(self, state):
        return all(is_fault for _, is_fault, _ in self.steps(state))

    def tidy(self, state):
        return state
