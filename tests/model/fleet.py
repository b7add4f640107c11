"""The fleet's money protocol, with two nodes, as a model that is searched whole.

Run `tests/model/run` (all of it, minutes) or `tests/model/run --quick` (CI, seconds).

WHAT IS MODELLED. One account with a balance of 2, two nodes a and b, and two or three calls with holds of
2, 1 and 1 (a row says which). A call comes to one node, and may cost anything up to its hold, unit by unit.
  Postgres  the balance; a pool per epoch: what was leased to it (amount) and what of that is neither
            consumed nor given back (left); a local tranche per boot; what is in suspense; what is booked per
            hold id; the current epoch; for each pool of an older epoch what every boot claims of it.
            Each transaction is one step. "Free" is the balance less all that is leased.
  Redis     one or two processes (a primary and what was its replica). Each has a mark (its own run_id and
            an epoch), a pool, holds with their checkpoints, tombstones, and the outbox.
  Node      a boot, live, dead or gone with its disk; the epoch it knows; the process it talks to; the free
            money of its local tranche; its calls; and the journal, a record per call.
Steps: lease and install; ask for a hold, the script runs, its answer arrives and the hold is written; give
up an answer, void; deliver (with its progress record), touch, settle and end; settle in Redis; post from the
journal, post from the outbox; lease and return a local tranche; find Redis unmarked, bump the epoch, mark;
learn of an epoch, report, free; restart (replay and a new boot); declare a boot lost; reap.
Faults: a node is killed, a node is lost with its disk, the lost disk turns up after all, the operator releases
what is in suspense; Redis loses all and comes back as another process, or as the same one (FLUSHALL); a replica
that is behind or not takes over from a primary that is dead, or is not (split brain); an answer is lost; a
deadline passes while the hold's boot lives or is not replayed; the epoch is bumped without a need.

WHAT MUST HOLD (`wrong`): no balance is negative and no CHECK refuses a charge; leases sum to no more than
the balance; what is delivered never exceeds it, a lost disk or not, unless an operator released suspense;
no call is booked above what was delivered, and none twice; nothing is written off as long as no disk is lost.
At rest the ledger is what was delivered, unless a disk was lost, and all that is leased can be spent
by somebody or is in suspense. And, from every state, rest can be reached with no further fault.

WHAT IS DELIBERATELY ABSENT. Several accounts and shards; top-ups; what `embedded.py` has: the tail that a
kill cuts off, power cuts, the order of journal, lease and end of boot, a local hold before its record; rate
limits; time (a deadline may pass at any moment); any script but admit that runs long after it was sent; a
bump while who won the last one is still to mark, but for the fault; a process of Redis that forgets a part of
its keys; a boot that is declared lost while it lives; idle pools that are given back; a third Redis. How far
a replica is behind is all or nothing: what it has is cleared before it is used, but for the outbox. A node
does not go back from the promoted replica to the old primary.
"""

from typing import NamedTuple

from explore import Refused

BALANCE = 2

# Where a call stands. CUT: its boot is dead. OVER: replayed. LOST: its boot was declared lost.
IDLE, ASKED, ANSWERED, OPEN, ENDED, CUT, OVER, LOST, DONE = range(9)
# Where a node's boot stands. STARTING: it knows an epoch and has no row yet (a broken variant).
LIVE, DEAD, GONE, NO_BOOT, STARTING = range(5)
# A record of the journal: none, an open hold with its progress, or settled at a cost.
NO_RECORD, SETTLED = -1, 10
LOCAL = -1  # a hold on the node's own tranche, instead of an epoch
NOT_BOOKED = -1


class Rules(NamedTuple):
    """The protocol's rules; a variant breaks one."""

    escrow: bool = True                # Redis spends only what Postgres has leased to it
    journal: bool = True
    outbox: bool = True                # of settlements
    post_once: bool = True             # by hold id
    fence: bool = True                 # a script looks whether the mark is this process' own
    mark_clears: bool = True           # marking a process clears the pools and holds in it
    mark_once: bool = True             # only who bumped the epoch marks, once; or anybody who finds no mark
    register_first: bool = True        # a boot has its row before it reads the epoch
    stop_before_report: bool = True    # on an epoch that it reported a node asks for nothing
    all_report: bool = True            # a pool is freed when all have reported
    dead_block: bool = True            # a boot that is dead and not replayed has not reported
    claims: str = "all"                # or "no unposted", "journal only", "answered only", "open and unvoided"
    keep_claims: bool = True           # what is reported stays leased
    void: bool = True                  # of a hold whose answer is lost
    tombstone: bool = True
    reap: bool = True
    reap_captures: str = "the hold"    # or "the checkpoint": the rest is released in Redis
    reap_noted: bool = True            # in the outbox
    reap_once: bool = True             # X is posted once, whatever else is booked of the hold
    reap_suspends: bool = True         # what a hold has beyond its checkpoint
    reap_frees: bool = True            # that, once its boot has another end for it
    reap_open_only: bool = True        # on a frozen pool X is nothing
    suspense: bool = True              # what a lost boot may owe is not freed
    clear_looks: bool = True           # all that a lost boot left in Redis is posted before its pool is cleared
    late_is_bounded: bool = True       # by what is in suspense and free
    memory_before_return: bool = True  # a local tranche


class Bounds(NamedTuple):
    """How much may go wrong, and which calls there are."""

    kills: int = 0
    disks: int = 0
    returns: int = 0   # of lost disks
    releases: int = 0  # of suspense
    losses: int = 0    # of all that Redis has
    flushes: int = 0
    promotes: int = 0
    answers: int = 0   # that are lost
    reaps: int = 0     # deadlines that pass though nobody knows the boot to be over
    bumps: int = 0     # without a need
    tranches: int = 0  # that are returned
    local: bool = True  # whether nodes have local tranches
    calls: tuple = ((0, 2), (1, 1))  # (node, hold)


class Call(NamedTuple):
    phase: int = IDLE
    tried: bool = False      # its id in Redis is used up
    epoch: int = 0           # of its id in Redis
    server: int = 0
    on_its_way: bool = False  # the admit is
    owed: bool = False       # a void is
    place: int = 0           # what it is delivered on: an epoch, or LOCAL
    delivered: int = 0
    record: int = NO_RECORD
    booked: int = NOT_BOOKED
    reaped: bool = False     # the outbox' X is posted
    rest: int = NOT_BOOKED   # what is suspended of its id in Redis


class Node(NamedTuple):
    boot: int = LIVE
    epoch: int = 1   # that it knows; 0 is none
    server: int = 0  # that it talks to
    local: int = 0   # free in memory
    moving: int = 0  # out of memory, not returned yet
    tranche: int = 0  # leased in Postgres
    mark: int = 0    # the epoch that it has to mark its server with


class Server(NamedTuple):
    alive: bool = True
    mark: int = 0
    own: bool = True   # whether the mark has this process' run_id
    total: int = 0     # installed
    free: int = 0
    holds: tuple = ()  # (call, checkpoint)
    tombs: tuple = ()
    outbox: tuple = ()  # (call, cost, whether it was reaped)


class Pool(NamedTuple):
    epoch: int
    amount: int = 0
    left: int = 0
    claims: tuple = (None, None)  # of the boots, once it is frozen
    lost: int = 0       # claims of boots that were declared lost
    suspect: bool = False


class State(NamedTuple):
    posted: int
    suspense: int
    written_off: int
    epoch: int
    home: int  # the server whose run_id the epoch has, -1 when that process is no more
    pools: tuple
    servers: tuple
    nodes: tuple
    calls: tuple
    bounds: Bounds
    spent: int = 0  # by calls that are forgotten
    inexact: bool = False   # a disk was lost
    released: bool = False  # suspense was


def cost_of(record):
    """What a replay charges for a record."""
    return record - SETTLED if record >= SETTLED else max(record, 0)


def unposted(call):
    return call.booked < 0 or (call.rest >= 0 and call.place == call.epoch)


def put(values, i, **change):
    return values[:i] + (values[i]._replace(**change),) + values[i + 1:]


def with_node(state, n, **change):
    return state._replace(nodes=put(state.nodes, n, **change))


def with_server(state, s, **change):
    return state._replace(servers=put(state.servers, s, **change))


def with_call(state, i, **change):
    return state._replace(calls=put(state.calls, i, **change))


def with_pool(state, epoch, **change):
    pools = tuple(p._replace(**change) if p.epoch == epoch else p for p in state.pools)
    return state._replace(pools=pools)


def pool_of(state, epoch):
    return next((pool for pool in state.pools if pool.epoch == epoch), None)


def free(state):
    return (state.posted - state.suspense - sum(pool.left for pool in state.pools)
            - sum(node.tranche for node in state.nodes) - sum(max(call.rest, 0) for call in state.calls))


def without(pairs, i):
    return tuple(pair for pair in pairs if pair[0] != i)


def name(n):
    return "ab"[n]


class Fleet:
    def __init__(self, rules=Rules(), bounds=Bounds()):
        self.rules, self.bounds = rules, bounds
        self.holds = tuple(hold for _, hold in bounds.calls)
        self.of = tuple(node for node, _ in bounds.calls)

    def first(self):
        whole = 0 if self.rules.escrow else BALANCE
        redis = Server(mark=1, total=whole, free=whole)
        return State(BALANCE, 0, 0, 1, 0, (Pool(1),), (redis,), (Node(),) * 2, (Call(),) * len(self.holds),
                     self.bounds._replace(calls=()))

    def steps(self, state):
        rules = self.rules
        for n, node in enumerate(state.nodes):
            if node.boot == LIVE:
                yield from self.epochs(state, n, node)
                yield from self.leases(state, n, node)
                yield from self.reap(state, n, node)
                yield from self.post(state, n)
            else:
                yield from self.recover(state, n, node)
        for i, call in enumerate(state.calls):
            if call.phase <= ENDED and state.nodes[self.of[i]].boot == LIVE:
                yield from self.admit(state, i, call, self.of[i])
                yield from self.serve(state, i, call, self.of[i])
            if call.on_its_way:
                yield from self.run(state, i, call)
        for s, server in enumerate(state.servers):
            if server.alive:
                for i, cost, reaped in server.outbox:
                    words = f"post {i} from the outbox"
                    known = state.calls[i].reaped if reaped else state.calls[i].booked >= cost
                    if known:
                        yield f"acknowledge {i}", False, with_server(state, s, outbox=without(server.outbox, i))
                    if not known or not (rules.reap_once if reaped else rules.post_once):
                        yield words, False, (self.crossed if reaped else self.book)(state, i, cost, words)
        yield from self.faults(state)

    def valid(self, state, s, epoch):
        """What each script asks first."""
        server = state.servers[s]
        return server.alive and server.mark == epoch > 0 and (server.own or not self.rules.fence)

    # Epochs: bump, mark, learn, report, free.

    def epochs(self, state, n, node):
        rules, who = self.rules, name(n)
        here = state.servers[node.server]
        if node.epoch < state.epoch:
            yield f"{who} learns of epoch {state.epoch}", False, with_node(state, n, epoch=state.epoch)
        if node.server + 1 < len(state.servers) and not node.mark:
            yield f"{who} finds the promoted replica", False, with_node(state, n, server=node.server + 1)
        newest = node.server + 1 == len(state.servers)
        known = node.epoch == state.epoch
        if known and newest and here.alive and not self.valid(state, node.server, state.epoch):
            waits = any(other.mark == state.epoch for other in state.nodes)
            if not waits:
                yield f"{who} bumps the epoch to {state.epoch + 1}", False, self.bumped(state, n, node.server)
            if not rules.mark_once and state.home == node.server:
                yield f"{who} marks Redis again", False, self.marked(state, node.server, state.epoch)
        if node.mark:
            after = with_node(state, n, mark=0)
            if here.alive and here.mark < node.mark:
                after = self.marked(after, node.server, node.mark)
            yield f"{who} marks Redis with {node.mark}", False, after
        for pool in state.pools:
            stopped = node.epoch > pool.epoch or not rules.stop_before_report
            if pool.epoch < state.epoch and stopped:
                claim = self.claim(state, n, pool.epoch)
                if pool.claims[n] is None or claim < pool.claims[n]:
                    yield f"{who} reports {claim} for epoch {pool.epoch}", False, self.claimed(
                        state, pool.epoch, n, claim)

    def bumped(self, state, n, s):
        """One transaction: the epoch, by compare-and-set, and all older pools are frozen."""
        boots = tuple(None if node.boot in (LIVE, DEAD, GONE) else 0 for node in state.nodes)
        pools = tuple(pool._replace(claims=boots) if pool.epoch == state.epoch else pool for pool in state.pools)
        after = state._replace(epoch=state.epoch + 1, home=s, pools=pools + (Pool(state.epoch + 1),))
        after = self.freed(after, state.epoch)  # with one node left there is perhaps nobody to wait for
        return with_node(after, n, epoch=state.epoch + 1, mark=state.epoch + 1)

    def marked(self, state, s, epoch):
        server = state.servers[s]
        if self.rules.mark_clears:
            server = Server(outbox=server.outbox)
        if not self.rules.escrow:
            server = server._replace(total=state.posted, free=state.posted)
        server = server._replace(mark=epoch, own=True)
        return state._replace(servers=state.servers[:s] + (server,) + state.servers[s + 1:])

    def claim(self, state, n, epoch):
        """What a node may still charge to a pool."""
        claim, how = 0, self.rules.claims
        for i, call in enumerate(state.calls):
            if self.of[i] != n:
                continue
            if call.epoch == epoch and (
                    (call.phase == ASKED and how in ("all", "no unposted", "open and unvoided"))
                    or (call.phase == ANSWERED and how != "journal only")):
                claim += self.holds[i]
            if call.owed and call.epoch == epoch and how == "open and unvoided":
                claim += self.holds[i]
            if call.place == epoch and call.phase == OPEN:
                claim += self.holds[i]
            if call.place == epoch and call.phase == ENDED and unposted(call) and how != "no unposted":
                claim += call.delivered
        return claim

    def claimed(self, state, epoch, n, claim):
        claims = pool_of(state, epoch).claims
        state = with_pool(state, epoch, claims=claims[:n] + (claim,) + claims[n + 1:])
        return self.freed(state, epoch)

    def freed(self, state, epoch):
        """In the transaction of a report: what nobody claims goes back when all have reported."""
        pool, rules = pool_of(state, epoch), self.rules
        claims = 0
        for n, claim in enumerate(pool.claims):
            dead = state.nodes[n].boot in (DEAD, GONE)
            if claim is None and rules.all_report and (rules.dead_block or not dead):
                return state
            claims += claim or 0
        if not rules.keep_claims:
            claims = 0
        left = min(pool.left, claims)
        rest = pool.left - left
        suspended = rest if pool.suspect else min(rest, pool.lost)
        if not rules.suspense:
            suspended = 0
        state = with_pool(state, epoch, left=left, lost=pool.lost - min(rest, pool.lost))
        return state._replace(suspense=state.suspense + suspended)

    # Leases.

    def leases(self, state, n, node):
        rules, who = self.rules, name(n)
        pool, here = pool_of(state, node.epoch), state.servers[node.server]
        valid = self.valid(state, node.server, node.epoch)
        if rules.escrow and pool and valid:
            if node.epoch == state.epoch and free(state) > 0 and pool.amount <= here.total:
                yield f"{who} leases 1 to pool {pool.epoch}", False, with_pool(
                    state, pool.epoch, amount=pool.amount + 1, left=pool.left + 1)
            if pool.amount > here.total:
                # The total is installed, not the difference: anybody may repeat it.
                more = pool.amount - here.total
                yield f"{who} installs {pool.amount} in pool {pool.epoch}", False, with_server(
                    state, node.server, free=here.free + more, total=pool.amount)
        wanted = any(call.phase == IDLE and self.of[i] == n and self.holds[i] == 1
                     for i, call in enumerate(state.calls))
        if rules.escrow and state.bounds.local and wanted and free(state) > 0 and not node.local and not node.moving:
            yield f"{who} leases 1 to itself", False, with_node(
                state, n, local=node.local + 1, tranche=node.tranche + 1)
        if node.local and not node.moving and state.bounds.tranches:
            left = state._replace(bounds=state.bounds._replace(tranches=state.bounds.tranches - 1))
            if rules.memory_before_return:
                yield f"{who} takes {node.local} out of memory", False, with_node(
                    left, n, local=0, moving=node.local)
            else:
                yield f"{who} returns {node.local}", False, with_node(
                    left, n, tranche=node.tranche - node.local, moving=node.local)
        if node.moving and rules.memory_before_return:
            yield f"{who} returns {node.moving}", False, with_node(
                state, n, tranche=node.tranche - node.moving, moving=0)
        elif node.moving:
            yield f"{who} takes it out of memory", False, with_node(
                state, n, local=max(node.local - node.moving, 0), moving=0)

    # A call.

    def admit(self, state, i, call, n):
        node, bounds, who = state.nodes[n], state.bounds, name(n)
        hold = self.holds[i]
        if call.phase == IDLE and not call.tried and self.valid(state, node.server, node.epoch):
            yield f"{who} asks for hold {i} in epoch {node.epoch}", False, with_call(
                state, i, phase=ASKED, epoch=node.epoch, server=node.server, on_its_way=True)
        if call.phase == IDLE and node.local >= hold:
            yield f"{who} holds {i} on its tranche", False, with_call(
                with_node(state, n, local=node.local - hold), i, phase=OPEN, place=LOCAL, record=0)
        if call.phase == ANSWERED:
            yield f"{who} has the answer and writes hold {i}", False, with_call(
                state, i, phase=OPEN, place=call.epoch, record=0)
        if call.phase in (ASKED, ANSWERED):
            given_up = with_call(state, i, phase=IDLE, tried=True, owed=self.rules.void)
            if node.epoch > call.epoch or not self.valid(state, call.server, call.epoch):
                yield f"{who} gives up the answer for {i}", False, given_up
            elif bounds.answers:
                left = given_up._replace(bounds=bounds._replace(answers=bounds.answers - 1))
                yield f"LOSE the answer for {i}", True, left
        if call.owed:
            after, server = with_call(state, i, owed=False), state.servers[call.server]
            if self.valid(state, call.server, call.epoch):
                if any(held == i for held, _ in server.holds):
                    after = with_server(after, call.server, free=server.free + hold, holds=without(server.holds, i))
                elif self.rules.tombstone:
                    after = with_server(after, call.server, tombs=server.tombs + (i,))
            yield f"{who} voids hold {i}", False, after

    def run(self, state, i, call):
        """The admit script runs, be it that nobody waits for its answer any more."""
        server, after = state.servers[call.server], with_call(state, i, on_its_way=False)
        if self.valid(state, call.server, call.epoch) and server.free >= self.holds[i] and i not in server.tombs:
            after = with_server(after, call.server, free=server.free - self.holds[i],
                                holds=tuple(sorted(server.holds + ((i, 0),))))
            phase = ANSWERED if call.phase == ASKED else call.phase
            yield f"Redis holds {i}", False, with_call(after, i, phase=phase)
        elif call.phase == ASKED and server.alive:
            yield f"Redis refuses {i}", False, with_call(after, i, phase=IDLE, tried=True)
        elif call.phase != ASKED:
            yield f"Redis refuses {i} to nobody", False, after

    def serve(self, state, i, call, n):
        node, who, hold = state.nodes[n], name(n), self.holds[i]
        known = self.valid(state, call.server, call.epoch) and node.server == call.server and call.place == call.epoch
        held = None
        if known:
            held = next((point for held, point in state.servers[call.server].holds if held == i), None)
        if call.phase == OPEN:
            if call.delivered < hold:
                yield f"{who} delivers to {i}", False, with_call(
                    state, i, delivered=call.delivered + 1, record=call.record + 1)
            ended = with_call(state, i, phase=ENDED, record=SETTLED + call.delivered)
            if call.place == LOCAL:
                ended = with_node(ended, n, local=node.local + hold - call.delivered)
            yield f"{who} settles {i} and delivers its end", False, ended
            if held is not None and held < call.delivered and self.touches(state):
                server = state.servers[call.server]
                holds = tuple(sorted(without(server.holds, i) + ((i, call.delivered),)))
                yield f"{who} touches {i}", False, with_server(state, call.server, holds=holds)
        if call.phase == ENDED and held is not None:
            yield f"{who} settles {i} in Redis", False, self.settled(state, call.server, i, call.delivered)

    def touches(self, state):
        return self.bounds.disks or self.bounds.reaps or self.rules.reap_captures == "the checkpoint"

    def settled(self, state, s, i, cost):
        server = state.servers[s]
        noted = server.outbox + ((i, cost, False),) * self.rules.outbox
        return with_server(state, s, free=server.free + self.holds[i] - cost, holds=without(server.holds, i),
                           outbox=tuple(sorted(noted)))

    # Postgres.

    def post(self, state, n):
        for i, call in enumerate(state.calls):
            unused = call.phase not in (ASKED, ANSWERED) and call.place != call.epoch
            if self.of[i] == n and call.phase <= ENDED and call.rest >= 0 and unused and self.rules.reap_frees:
                yield f"{name(n)} gives up what is suspended of {i}", False, with_call(state, i, rest=NOT_BOOKED)
        batch = [i for i, call in enumerate(state.calls)
                 if self.of[i] == n and call.phase == ENDED and unposted(call)]
        if batch and self.rules.journal:
            words = f"{name(n)} posts {', '.join(map(str, batch))}"
            for i in batch:
                state = self.book(state, i, state.calls[i].delivered, words)
            yield words, False, state

    def book(self, state, i, cost, words):
        """Books a call once; what comes later for it and is more is a late charge."""
        call = state.calls[i]
        if call.rest >= 0 and call.place == call.epoch:
            more = max(cost - max(call.booked, 0), 0)
            paid = min(more, call.rest)
            state = with_call(state, i, booked=max(call.booked, cost), rest=NOT_BOOKED)
            return self.late(state._replace(posted=state.posted - paid), more - paid)
        if call.booked >= 0 and self.rules.post_once:
            if cost <= call.booked:
                return state
            return self.late(with_call(state, i, booked=cost), cost - call.booked)
        state = with_call(state, i, booked=max(call.booked, 0) + cost)
        if not self.rules.escrow:
            return state._replace(posted=state.posted - cost)
        if call.place == LOCAL:
            if call.phase == LOST:
                return self.late(state, cost)
            node = state.nodes[self.of[i]]
            if node.tranche < cost or state.posted < cost:
                raise Refused("the ledger's CHECK refuses a charge for ever", words)
            state = with_node(state, self.of[i], tranche=node.tranche - cost)
        else:
            pool = pool_of(state, call.place)
            if not pool or (pool.left < cost and (pool.suspect or call.phase == LOST)):
                return self.late(state, cost)
            if pool.left < cost or state.posted < cost:
                raise Refused("the ledger's CHECK refuses a charge for ever", words)
            state = with_pool(state, call.place, left=pool.left - cost)
        return state._replace(posted=state.posted - cost)

    def late(self, state, cost):
        """Out of suspense, then out of what is free; the rest is written off."""
        suspended = min(state.suspense, cost)
        paid = cost
        if self.rules.late_is_bounded:
            paid = suspended + min(free(state), cost - suspended)
        return state._replace(suspense=state.suspense - suspended, posted=state.posted - paid,
                              written_off=state.written_off + cost - paid)

    # A boot's end, and what it leaves in Redis.

    def recover(self, state, n, node):
        who, words = name(n), f"{name(n)} restarts and replays"
        servers = [s for s, server in enumerate(state.servers) if server.alive]
        if node.boot == DEAD:
            for i, call in enumerate(state.calls):
                if self.of[i] == n and call.phase == CUT:
                    if call.record != NO_RECORD and self.rules.journal:
                        state = self.book(state, i, cost_of(call.record), words)
                    state = with_call(state, i, phase=OVER)
                    if self.rules.reap_frees:
                        state = with_call(state, i, rest=NOT_BOOKED)
            state = with_node(state, n, boot=NO_BOOT, tranche=0)
            for pool in state.pools:
                if pool.epoch < state.epoch:
                    state = self.claimed(state, pool.epoch, n, 0)
            yield words, False, self.started(state, n, servers[-1])
        if node.boot == NO_BOOT:
            for s in servers:
                yield f"{who} starts", False, self.started(state, n, s)
        if node.boot == STARTING:
            yield f"{who} writes its row", False, with_node(state, n, boot=LIVE)
        if node.boot == GONE:
            state = state._replace(suspense=state.suspense + node.tranche * self.rules.suspense)
            for i, call in enumerate(state.calls):
                if self.of[i] == n and call.phase == CUT:
                    state = with_call(state, i, phase=LOST)
            state = with_node(state, n, boot=NO_BOOT, tranche=0)
            for pool in state.pools:
                claim = pool.claims[n] if pool.epoch < state.epoch else None
                if claim is None:
                    state = with_pool(state, pool.epoch, suspect=True)
                else:
                    state = with_pool(state, pool.epoch, lost=pool.lost + claim)
                if pool.epoch < state.epoch:
                    state = self.claimed(state, pool.epoch, n, 0)
            yield f"the operator declares {who} lost", False, state

    def started(self, state, n, s):
        if self.rules.register_first:
            return with_node(state, n, boot=LIVE, epoch=0, server=s)
        return with_node(state, n, boot=STARTING, epoch=state.epoch, server=s)

    def reap(self, state, n, node):
        s, rules, bounds = node.server, self.rules, state.bounds
        if not rules.reap or not self.valid(state, s, node.epoch):
            return
        server, pool = state.servers[s], pool_of(state, node.epoch)
        if pool and pool.suspect and node.epoch == state.epoch:
            left_behind = {entry[0] for entry in server.holds + server.outbox}
            if not rules.clear_looks or all(state.calls[i].phase != LOST for i in left_behind):
                yield f"{name(n)} clears pool {pool.epoch}", False, with_pool(state, pool.epoch, suspect=False)
        for i, point in server.holds:
            call = state.calls[i]
            left = state
            if call.phase not in (OVER, LOST):
                if not bounds.reaps:
                    continue
                left = state._replace(bounds=bounds._replace(reaps=bounds.reaps - 1))
            words = f"{name(n)} reaps {i} at {point}"
            if rules.reap_captures == "the checkpoint":
                yield words, False, self.settled(left, s, i, point)
            else:
                noted = server.outbox + ((i, point, True),) * rules.reap_noted
                yield words, False, with_server(
                    left, s, holds=without(server.holds, i), outbox=tuple(sorted(noted)))

    def crossed(self, state, i, point, words):
        """One transaction: a reaped hold leaves its pool whole. Who knows better than its checkpoint has the word."""
        call, pool, hold = state.calls[i], pool_of(state, state.calls[i].epoch), self.holds[i]
        same = call.place == call.epoch
        booked = call.booked if same else NOT_BOOKED
        state = with_call(state, i, reaped=True)
        if call.epoch != state.epoch and self.rules.reap_open_only:
            # A frozen pool is settled by journals and claims alone.
            if call.phase == LOST and booked < 0 and point:
                state = self.late(with_call(state, i, booked=point), point)
            return state
        out = hold - max(booked, 0)
        if not pool or pool.left < out:
            raise Refused("the ledger's CHECK refuses a reaped hold for ever", words)
        state = with_pool(state, call.epoch, left=pool.left - out)
        if booked >= 0:
            return state
        if same:
            state = with_call(state, i, booked=point)
        rest = hold - point if call.phase != OVER and self.rules.reap_suspends else NOT_BOOKED
        return with_call(state, i, rest=rest)._replace(posted=state.posted - point)

    # Faults.

    def faults(self, state):
        bounds = state.bounds
        for kind, boot, words in (("kills", DEAD, "KILL"), ("disks", GONE, "LOSE the disk of")):
            if getattr(bounds, kind):
                left = state._replace(bounds=bounds._replace(**{kind: getattr(bounds, kind) - 1}))
                for n, node in enumerate(state.nodes):
                    if node.boot == LIVE or (node.boot == DEAD and boot == GONE):
                        yield f"{words} {name(n)}", True, self.killed(left, n, boot)
        if bounds.returns and any(call.phase == LOST for call in state.calls):
            after = state._replace(bounds=bounds._replace(returns=bounds.returns - 1))
            for i, call in enumerate(state.calls):
                if call.phase == LOST and call.record != NO_RECORD:
                    after = self.book(after, i, cost_of(call.record), "THE LOST DISK turns up")
            yield "THE LOST DISK turns up", True, after
        if bounds.releases and (state.suspense or any(c.phase == LOST and c.rest > 0 for c in state.calls)):
            left = state._replace(bounds=bounds._replace(releases=bounds.releases - 1))
            calls = tuple(c._replace(rest=min(c.rest, 0)) if c.phase == LOST else c for c in state.calls)
            yield "RELEASE suspense", True, left._replace(suspense=0, calls=calls, released=True)
        if bounds.bumps:
            left = state._replace(bounds=bounds._replace(bumps=bounds.bumps - 1))
            for n, node in enumerate(state.nodes):
                if node.boot == LIVE and node.epoch == state.epoch and not node.mark:
                    yield f"{name(n)} BUMPS the epoch, to no Redis", True, with_node(
                        self.bumped(left, n, -1), n, mark=0)
        last = len(state.servers) - 1
        if bounds.losses:
            left = state._replace(bounds=bounds._replace(losses=bounds.losses - 1))
            left = left._replace(nodes=tuple(
                node._replace(mark=0) if node.server == last else node for node in left.nodes))
            yield "LOSE Redis", True, self.emptied(left, last)._replace(home=-1)
        if bounds.flushes:
            left = state._replace(bounds=bounds._replace(flushes=bounds.flushes - 1))
            yield "FLUSH Redis", True, self.emptied(left, last)
        if bounds.promotes and last == 0 and state.servers[0].alive:
            left = state._replace(bounds=bounds._replace(promotes=bounds.promotes - 1))
            old = state.servers[0]
            current = old._replace(own=False)
            yield "SPLIT, a replica without delay is promoted", True, left._replace(servers=(old, current))
            yield "SPLIT, an empty replica is promoted", True, left._replace(servers=(old, Server()))
            # The same as a loss but for what the replica has.
            nodes = tuple(node._replace(mark=0) for node in state.nodes)
            yield "FAIL OVER to a replica", True, left._replace(servers=(current,), nodes=nodes, home=-1)

    def emptied(self, state, s):
        return state._replace(servers=state.servers[:s] + (Server(),) + state.servers[s + 1:])

    def killed(self, state, n, boot):
        for i, call in enumerate(state.calls):
            if self.of[i] == n and (call.phase in (ASKED, ANSWERED, OPEN, ENDED) or call.tried):
                if call.phase <= ENDED:
                    state = with_call(state, i, phase=CUT, owed=False)
        state = with_node(state, n, boot=boot, epoch=0, server=0, local=0, moving=0, mark=0)
        return state._replace(inexact=state.inexact or boot == GONE)

    # What must hold.

    def wrong(self, state):
        available = free(state)
        if state.posted < 0 or (self.rules.escrow and available < 0):
            return f"balance {state.posted}, of which {available} free"
        delivered = state.spent + sum(call.delivered for call in state.calls)
        if delivered > BALANCE and not state.released:
            return f"{delivered} delivered on a balance of {BALANCE}"
        if any(pool.left < 0 for pool in state.pools):
            return "more is taken from a pool than is left in it"
        for i, call in enumerate(state.calls):
            if call.booked > call.delivered:
                return f"call {i} is charged {call.booked} for {call.delivered} delivered"
        if state.written_off and not state.inexact:
            return f"{state.written_off} written off, and no disk is lost"
        if self.at_rest(state):
            charged = BALANCE - state.posted
            if charged > delivered or (charged < delivered and not state.inexact):
                return f"{delivered} delivered, {charged} charged for ever"
        return None

    def at_rest(self, state):
        """Nothing is owed to anybody, and what is leased can be spent."""
        for call in state.calls:
            if call.phase not in (IDLE, DONE, LOST) or call.owed or call.on_its_way or (
                    call.rest >= 0 and call.phase != LOST):
                return False
        if any(node.boot not in (LIVE, NO_BOOT) or node.moving or node.tranche != node.local
               for node in state.nodes):
            return False
        if not self.rules.escrow:
            return not any(server.holds or server.outbox for server in state.servers)
        last = len(state.servers) - 1
        server = state.servers[last]
        usable = server.free if self.valid(state, last, state.epoch) and not server.holds else 0
        return sum(pool.left for pool in state.pools) == usable and not server.outbox

    def tidy(self, state):
        """Forgets what no later step can see, and gives what is left its first name."""
        rules = self.rules
        if not (rules.fence and rules.mark_once and rules.mark_clears and rules.post_once and rules.reap_once
                and rules.escrow):
            return state
        servers, nodes, calls = list(state.servers), list(state.nodes), list(state.calls)
        last = len(servers) - 1
        # A process whose mark nobody carries any more answers STALE to all.
        used = {state.epoch} | {node.epoch for node in nodes if node.boot in (LIVE, STARTING)}
        used |= {call.epoch for call in calls if call.phase in (ASKED, ANSWERED)}
        marks = set()
        for s, server in enumerate(servers):
            outbox = server.outbox
            if outbox:
                outbox = tuple((i, cost, reaped) for i, cost, reaped in outbox
                               if not (calls[i].reaped if reaped else calls[i].booked >= cost))
            if not (server.own and server.mark in used):
                server = Server(alive=server.alive, outbox=outbox)
            elif outbox != server.outbox:
                server = server._replace(outbox=outbox)
            servers[s] = server
            if server.mark:
                marks.add(server.mark)
        pending = {node.mark for node in nodes if node.mark}
        for n, node in enumerate(nodes):
            if node.boot == LIVE:
                # To learn and to find the replica are steps that it can take at any time, and here it has no other.
                if node.epoch not in marks and node.epoch not in pending:
                    node = node._replace(epoch=state.epoch)
                if node.server < last and not servers[node.server].mark and not node.mark:
                    node = node._replace(server=last)
                nodes[n] = node
        spent, suspense = state.spent, state.suspense
        held = {entry[0] for server in servers for entry in server.holds + server.outbox}
        for i, call in enumerate(calls):
            if call.phase == DONE:
                continue
            if (call.on_its_way and call.phase != ASKED or call.owed) and servers[call.server].mark != call.epoch:
                call = call._replace(on_its_way=call.on_its_way and call.phase == ASKED, owed=False)
            busy = call.on_its_way or call.owed or i in held
            over = call.phase == OVER or (call.phase == ENDED and call.booked >= 0) or (
                call.phase == LOST and not state.bounds.returns)
            if over and not busy and (call.rest < 0 or call.phase == LOST):
                spent += call.delivered
                suspense += max(call.rest, 0)
                call = Call(DONE)
            elif call.phase >= OPEN and call.tried:
                call = call._replace(tried=False)
            if not busy and call.epoch and call.place != call.epoch and call.rest < 0 and (
                    call.phase in (IDLE, OPEN, ENDED)):
                call = call._replace(epoch=0, server=0, reaped=False)
            calls[i] = call
        for s, server in enumerate(servers):
            if server.tombs:
                tombs = tuple(sorted(i for i in server.tombs if calls[i].on_its_way))
                servers[s] = server._replace(tombs=tombs)
        pools = []
        for pool in state.pools:
            if pool.left or pool.epoch in used:
                # Of the two totals only the difference counts.
                total = next((server.total for server in servers if server.mark == pool.epoch), None)
                amount = 0 if total is None and pool.epoch != state.epoch and (
                    pool.epoch not in pending) else pool.amount - (total or 0)
                pools.append(pool if amount == pool.amount else pool._replace(amount=amount))
        servers = [server._replace(total=0) if server.total else server for server in servers]
        home = state.home
        if last and not servers[0].mark and not servers[0].outbox and not any(
                node.server == 0 and node.boot == LIVE for node in nodes):
            servers = servers[1:]
            home = home - 1 if home > 0 else -1
            nodes = [node._replace(server=0) if node.server else node for node in nodes]
            calls = [call._replace(server=0) if call.server else call for call in calls]
        state = state._replace(servers=tuple(servers), nodes=tuple(nodes), calls=tuple(calls), pools=tuple(pools),
                               spent=spent, suspense=suspense, home=home if not rules.mark_once else -1)
        return self.renamed(state)

    def renamed(self, state):
        """Epochs are counted from 1 and without gaps."""
        if state.epoch == len(state.pools):
            return state
        names = {state.epoch} | {pool.epoch for pool in state.pools}
        for node in state.nodes:
            names |= {node.epoch, node.mark}
        for call in state.calls:
            names |= {call.epoch, call.place}
        names |= {server.mark for server in state.servers}
        order = sorted(e for e in names if e > 0)
        if order[-1] == len(order):
            return state
        new = {e: i for i, e in enumerate(order, 1)}
        new[0], new[LOCAL] = 0, LOCAL
        return state._replace(
            epoch=new[state.epoch],
            pools=tuple(pool._replace(epoch=new[pool.epoch]) for pool in state.pools),
            nodes=tuple(node._replace(epoch=new[node.epoch], mark=new[node.mark]) for node in state.nodes),
            calls=tuple(call._replace(epoch=new[call.epoch], place=new[call.place]) for call in state.calls),
            servers=tuple(server._replace(mark=new[server.mark]) for server in state.servers))
