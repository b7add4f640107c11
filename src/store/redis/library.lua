-- The hot store's verbs. One source, loaded as a Function library or run as a script: see `library.rs`.
--
-- All keys of a shard begin with `base`, which holds the shard's hash tag, so that they share one slot and one server:
--   money    hash    run, epoch: which process may spend this, and under which number; and of each account
--                    i installed, a available, h held, c captured, r recalled: i = a + h + c + r
--   outbox   stream  ends that the ledger may not have: r: the record for the ledger; p: held, cost and shortfall, or, of a hold that was reaped,
--                    'X', its boot and what its call had cost
--   revoked  set     digests of keys
--   w:<scope>  string  two sliding minutes, requests and tokens, in doubles
--   r:<scope>  zset    calls that run, by when they are given up
--   b:<scope>:<window>  string  money spent or reserved in a budget's window
-- and of each epoch, so that no other can find them:
--   holds:<epoch>  hash  hold -> 'O' and what it took while it is open, then 'E' or 'X' and how it ended, and which
--                        entry of the outbox says so
--   due:<epoch>    zset  open holds by deadline
--   costs:<epoch>  hash  hold -> what its call has cost so far
--   ended:<epoch>  zset  ended holds by when they are forgotten
-- An operator may lose one. Money without its fence cannot be had, so that such a shard is stale; a hold without its
-- record keeps its money until the epoch ends.
--
-- A call names the key `base`, which never exists. While a cluster moves a slot key by key, whoever has it sends calls
-- for what is not there to whoever gets it; so no verb runs on a part of its keys, and none stops half-way.
--
-- Money is a decimal text. Only HINCRBY and INCRBY compute with it; Lua sees no more than the sign of what they
-- answer, and compares texts without a sign. Lua's own numbers are doubles: good for times and tokens below 2^53.
-- The clock is the server's. Nothing is written before every check has passed. No verb looks at all holds.
--
-- `filters::limit` and `filters::purse` say the same in Rust; `tests/it/holds` compares them.

local SPAN_MS = 60000
local BUCKETS = 61
-- Sum, first second in it, latest event; then each second's amount and latest event.
local HEAD_BYTES = 24
local WINDOW_BYTES = HEAD_BYTES + BUCKETS * 16
-- Longer than a window, so that it never goes while it counts.
local WINDOW_KEEP_MS = 121000
-- An ended hold answers a repeat for so long. Its admit has arrived, and nothing sends that twice.
local ENDED_KEEP_MS = 120000
-- A hold that was ended before it came may still be on its way, as long as TCP repeats it.
local NEVER_CAME_KEEP_MS = 3600000
local DAY_MS = 86400000
-- Ended holds forgotten by each that ends: more than one, so that they never pile up.
local FORGET_MAX = 4
-- The most that a budget's counter shows; more than a pool can hold.
local MONEY_MAX = '4611686018427387903'

local verbs = {}

-- Which process this is. A library's local lives as long as its process: it is neither replicated nor saved.
local run
local function me()
  if not run then run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') end
  return run
end

local function clock(base)
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- a >= b, of decimal texts without a sign and without leading zeros.
local function covers(a, b)
  if #a ~= #b then return #a > #b end
  return a >= b
end

local function add(key, field, amount)
  if amount ~= '0' then redis.call('HINCRBY', key, field, amount) end
end

local function less(key, field, amount)
  if amount ~= '0' then redis.call('HINCRBY', key, field, '-' .. amount) end
end

local function fence(base)
  local mark = redis.call('HMGET', base .. ':money', 'run', 'epoch')
  return me(), mark[1] == me() and mark[2] or ''
end

local function stale(base, epoch)
  local run, marked = fence(base)
  if marked == epoch then return nil end
  return { 'STALE', run, marked }
end

local function of_epoch(base, epoch)
  return {
    holds = base .. ':holds:' .. epoch, due = base .. ':due:' .. epoch,
    costs = base .. ':costs:' .. epoch, ended = base .. ':ended:' .. epoch,
  }
end

-- A sliding minute, as `filters::limit::window` has it: one bucket a second, which counts as a whole until sixty
-- seconds after its latest event. Buckets leave in their order, so the sum of those that count is kept, with the first
-- second that it contains: what a call has to look at are the seconds since the call before.
local function bucket(window, second)
  local amount, last = struct.unpack('<dd', window.bytes, HEAD_BYTES + (second % BUCKETS) * 16 + 1)
  if math.floor(last / 1000) ~= second then return 0, 0 end
  return amount, last
end

local function window(key, at, now)
  local bytes = redis.call('GETRANGE', key, at, at + WINDOW_BYTES - 1)
  if #bytes < WINDOW_BYTES then bytes = bytes .. string.rep('\0', WINDOW_BYTES - #bytes) end
  local sum, first, last = struct.unpack('<ddd', bytes)
  -- A clock that steps back stands still, for a minute at most: what is further ahead is forgotten.
  local forgotten = last > now + SPAN_MS
  if last > now and not forgotten then now = last end
  local found = { key = key, at = at, bytes = bytes, now = now, sum = sum, first = first, forgotten = forgotten }
  local newest = math.floor(now / 1000)
  if forgotten then found.bytes = string.rep('\0', WINDOW_BYTES) end
  if forgotten or last + SPAN_MS <= now then
    found.sum, found.first = 0, newest
    return found
  end
  for second = first, newest - BUCKETS + 1 do
    local amount, latest = bucket(found, second)
    if latest + SPAN_MS > now then break end
    found.sum, found.first = found.sum - amount, second + 1
  end
  return found
end

-- Milliseconds until `more` fits; nil: it fits now.
local function wait(window, limit, more)
  if window.sum + more <= limit then return nil end
  local sum = window.sum
  for second = window.first, math.floor(window.now / 1000) do
    local amount, last = bucket(window, second)
    sum = sum - amount
    if sum + more <= limit then return math.max(last + SPAN_MS - window.now, 1) end
  end
  return SPAN_MS
end

local function count(window, more)
  local second = math.floor(window.now / 1000)
  local amount = bucket(window, second) + more
  if window.forgotten then redis.call('SETRANGE', window.key, window.at, window.bytes) end
  window.sum = window.sum + more
  redis.call('SETRANGE', window.key, window.at, struct.pack('<ddd', window.sum, window.first, window.now))
  redis.call('SETRANGE', window.key, window.at + HEAD_BYTES + (second % BUCKETS) * 16,
    struct.pack('<dd', amount, window.now))
  if amount > 0 then window.latest = window.now end
end

-- Replaces what was reserved by what was used; forgotten once that second is.
local function correct(key, at, then_ms, reserved, used)
  local second = math.floor(then_ms / 1000)
  local place = at + HEAD_BYTES + (second % BUCKETS) * 16
  local bytes = redis.call('GETRANGE', key, place, place + 15)
  if #bytes < 16 then return end
  local amount, last = struct.unpack('<dd', bytes)
  if math.floor(last / 1000) ~= second then return end
  local corrected = math.max(amount - reserved, 0) + used
  redis.call('SETRANGE', key, place, struct.pack('<dd', corrected, last))
  local sum, first = struct.unpack('<dd', redis.call('GETRANGE', key, at, at + 15))
  if second >= first then
    redis.call('SETRANGE', key, at, struct.pack('<d', sum + corrected - amount))
  end
end

-- What counts, and milliseconds until none of it does, as `standings` in `admit.rs` reads them.
local function standing(window)
  if not window then return '- -' end
  local latest = window.latest
  if not latest then
    for second = math.floor(window.now / 1000), window.first, -1 do
      local amount, last = bucket(window, second)
      if amount > 0 then
        latest = last
        break
      end
    end
  end
  return text(window.sum) .. ' ' .. text(latest and latest + SPAN_MS - window.now or 0)
end

-- A hold's scopes as `scopes_of` in `admit.rs` writes them: key, account, then models.
local function read_scopes(base, args, at)
  local scopes = {}
  while args[at] do
    local name = args[at]
    local scope = {
      name = name, model = args[at + 1], windows = base .. ':w:' .. name, running = base .. ':r:' .. name,
      requests = tonumber(args[at + 2]), tokens = tonumber(args[at + 3]), take = tonumber(args[at + 4]),
      concurrency = tonumber(args[at + 5]), budgets = {},
    }
    local budgets = tonumber(args[at + 6])
    at = at + 7
    for i = 1, budgets do
      scope.budgets[i] = {
        window = args[at], key = base .. ':b:' .. name .. ':' .. args[at],
        previous = base .. ':b:' .. name .. ':' .. args[at + 1], room = args[at + 2], keep = args[at + 3],
      }
      at = at + 4
    end
    scopes[#scopes + 1] = scope
  end
  return scopes
end

local function open_windows(scope, now)
  if scope.requests then scope.of_requests = window(scope.windows, 0, now) end
  if scope.tokens then scope.of_tokens = window(scope.windows, WINDOW_BYTES, now) end
end

-- What a scope is over, in the order of `Counters::check`: kind, and milliseconds or which budget.
local function over(scope, index, now, unknown)
  open_windows(scope, now)
  if scope.requests then
    local ms = wait(scope.of_requests, scope.requests, 1)
    if ms then return 'R', text(ms) end
  end
  if scope.tokens then
    local ms = wait(scope.of_tokens, scope.tokens, scope.take)
    if ms then return 'T', text(ms) end
  end
  if scope.concurrency and redis.call('ZCOUNT', scope.running, '(' .. text(now), '+inf') >= scope.concurrency then
    return 'C', '1000'
  end
  for i, budget in ipairs(scope.budgets) do
    local spent = redis.call('GET', budget.key)
    if not spent then
      budget.fresh = true
      -- A window that follows one we know has just begun, and nothing was spent in it.
      if redis.call('EXISTS', budget.previous) == 0 then
        unknown[#unknown + 1] = text(index)
        unknown[#unknown + 1] = text(i)
      end
      spent = '0'
    end
    if budget.room == '' or not covers(budget.room, spent) then return 'B', text(i) end
  end
end

local function admitted(scopes, available)
  local standings = {}
  for index = 1, 2 do
    standings[#standings + 1] = standing(scopes[index].of_requests)
    standings[#standings + 1] = standing(scopes[index].of_tokens)
  end
  return { 'OK', available, table.concat(standings, ' ') }
end

-- epoch hold amount account boot lifetime_ms digest record model scopes...
function verbs.admit(base, args)
  local epoch, id, amount, account, boot, lifetime, digest, record, model = unpack(args, 1, 9)
  local refused = stale(base, epoch)
  if refused then return refused end
  local scopes = read_scopes(base, args, 10)
  local now = clock(base)
  local money, keys = base .. ':money', of_epoch(base, epoch)
  local known = redis.call('HGET', keys.holds, id)
  if known then
    -- The same once more: its answer was lost. Anything else came too late.
    if string.sub(known, 1, 1) ~= 'O' then return { 'CLOSED' } end
    local hold = cmsgpack.unpack(string.sub(known, 2))
    if hold[1] ~= amount or hold[2] ~= account then return { 'CLOSED' } end
    for index = 1, 2 do open_windows(scopes[index], now) end
    return admitted(scopes, redis.call('HGET', money, 'a' .. account) or '0')
  end
  if redis.call('SISMEMBER', base .. ':revoked', digest) == 1 then return { 'REVOKED' } end
  local unknown = {}
  for index, scope in ipairs(scopes) do
    local kind, detail = over(scope, index, now, unknown)
    if kind then return { 'OVER', text(index), kind, detail } end
  end
  if #unknown > 0 then return { 'UNKNOWN', unpack(unknown) } end
  local available = redis.call('HGET', money, 'a' .. account) or '0'
  if not covers(available, amount) then return { 'FUNDS', available } end

  -- Everything fits: take it.
  local deadline = now + tonumber(lifetime)
  local taken = {}
  for index, scope in ipairs(scopes) do
    local part = { scope.name, scope.model, '', '', scope.concurrency and '1' or '' }
    if scope.requests then count(scope.of_requests, 1) end
    if scope.tokens then
      count(scope.of_tokens, scope.take)
      part[3], part[4] = text(scope.of_tokens.now), text(scope.take)
    end
    if scope.requests or scope.tokens then redis.call('PEXPIRE', scope.windows, WINDOW_KEEP_MS) end
    if scope.concurrency then
      redis.call('ZREMRANGEBYSCORE', scope.running, '-inf', text(now))
      redis.call('ZADD', scope.running, text(deadline), id)
      redis.call('PEXPIRE', scope.running, DAY_MS)
    end
    for _, budget in ipairs(scope.budgets) do
      if budget.fresh then redis.call('SET', budget.key, '0', 'PXAT', budget.keep) end
      if amount ~= '0' then redis.call('INCRBY', budget.key, amount) end
      part[#part + 1] = budget.window
    end
    taken[index] = part
  end
  less(money, 'a' .. account, amount)
  add(money, 'h' .. account, amount)
  redis.call('HSET', keys.holds, id, 'O' .. cmsgpack.pack({ amount, account, boot, record, taken, model }))
  redis.call('ZADD', keys.due, text(deadline), id)
  return admitted(scopes, redis.call('HGET', money, 'a' .. account) or '0')
end

-- A budget's counter, as `Counters::end` changes it: never below zero.
local function correct_budget(key, reserved, cost, shortfall)
  local spent = redis.call('GET', key)
  if not spent then return end
  if reserved ~= '0' and redis.call('INCRBY', key, '-' .. reserved) < 0 then
    redis.call('SET', key, '0', 'KEEPTTL')
  end
  if cost ~= '0' then
    local sum = redis.pcall('INCRBY', key, cost)
    if type(sum) == 'table' then redis.call('SET', key, MONEY_MAX, 'KEEPTTL') end
  end
  if shortfall ~= '0' then redis.call('INCRBY', key, '-' .. shortfall) end
end

local function forget(keys, now)
  local ids = redis.call('ZRANGEBYSCORE', keys.ended, '-inf', text(now), 'LIMIT', 0, FORGET_MAX)
  if #ids == 0 then return end
  redis.call('HDEL', keys.holds, unpack(ids))
  redis.call('ZREM', keys.ended, unpack(ids))
end

-- What a hold took of the limits becomes what its call used; models that did not serve get back all of it.
local function give_back(base, id, taken, amount, cost, shortfall, model, tokens)
  for _, part in ipairs(taken) do
    local name, of_model, then_ms, reserved, runs = unpack(part, 1, 5)
    local served = of_model == '' or of_model == model
    if reserved ~= '' and (tokens ~= '' or not served) then
      local used = served and tonumber(tokens) or 0
      correct(base .. ':w:' .. name, WINDOW_BYTES, tonumber(then_ms), tonumber(reserved), used)
    end
    if runs ~= '' then redis.call('ZREM', base .. ':r:' .. name, id) end
    for i = 6, #part do
      local key = base .. ':b:' .. name .. ':' .. part[i]
      if served then correct_budget(key, amount, cost, shortfall) else correct_budget(key, amount, '0', '0') end
    end
  end
end

local function close(keys, id, how, now)
  redis.call('HSET', keys.holds, id, how)
  redis.call('ZREM', keys.due, id)
  redis.call('HDEL', keys.costs, id)
  redis.call('ZADD', keys.ended, text(now + ENDED_KEEP_MS), id)
  forget(keys, now)
end

-- epoch hold cost model tokens record; tokens empty: as reserved; record empty: nothing for the outbox
function verbs.settle(base, args)
  local epoch, id, cost, model, tokens, record = unpack(args, 1, 6)
  local refused = stale(base, epoch)
  if refused then return refused end
  local now = clock(base)
  local money, keys = base .. ':money', of_epoch(base, epoch)
  local known = redis.call('HGET', keys.holds, id)
  if not known then
    -- It never came, or comes later on a connection that dies: not any more.
    redis.call('HSET', keys.holds, id, 'E0 0 0')
    redis.call('ZADD', keys.ended, text(now + NEVER_CAME_KEEP_MS), id)
    return { 'UNKNOWN' }
  end
  local how = string.sub(known, 1, 1)
  if how ~= 'O' then return { how == 'X' and 'REAPED' or 'CLOSED', string.sub(known, 2) } end
  local amount, account, _, _, taken = unpack(cmsgpack.unpack(string.sub(known, 2)))

  local available = 'a' .. account
  local shortfall = '0'
  add(money, available, amount)
  if cost ~= '0' and redis.call('HINCRBY', money, available, '-' .. cost) < 0 then
    -- All that was there is taken; what is missing is the rest, without its sign.
    shortfall = string.sub(redis.call('HGET', money, available), 2)
    redis.call('HINCRBY', money, available, shortfall)
  end
  less(money, 'h' .. account, amount)
  add(money, 'c' .. account, cost)
  less(money, 'c' .. account, shortfall)

  local parts = amount .. ' ' .. cost .. ' ' .. shortfall
  local entry = ''
  if record ~= '' then entry = ' ' .. redis.call('XADD', base .. ':outbox', '*', 'r', record, 'p', parts) end
  give_back(base, id, taken, amount, cost, shortfall, model, tokens)
  close(keys, id, 'E' .. parts .. entry, now)
  return { 'OK', parts }
end

-- epoch lifetime_ms (hold cost)...
function verbs.touch(base, args)
  local refused = stale(base, args[1])
  if refused then return refused end
  local keys = of_epoch(base, args[1])
  local deadline = text(clock(base) + tonumber(args[2]))
  local closed = { 'OK' }
  for i = 3, #args, 2 do
    local id = args[i]
    local known = redis.call('HGET', keys.holds, id)
    if known and string.sub(known, 1, 1) == 'O' then
      redis.call('HSET', keys.costs, id, args[i + 1])
      redis.call('ZADD', keys.due, 'GT', deadline, id)
      for _, part in ipairs(cmsgpack.unpack(string.sub(known, 2))[5]) do
        if part[5] ~= '' then
          local running = base .. ':r:' .. part[1]
          redis.call('ZADD', running, 'GT', deadline, id)
          redis.call('PEXPIRE', running, DAY_MS)
        end
      end
    else
      closed[#closed + 1] = id
    end
  end
  return closed
end

-- epoch limit: ends holds past their deadline. Nothing of them is free again: all counts as captured, and the ledger
-- decides by its own records what of it was spent.
function verbs.reap(base, args)
  local refused = stale(base, args[1])
  if refused then return refused end
  local now, money, keys = clock(base), base .. ':money', of_epoch(base, args[1])
  local reaped = { 'OK' }
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', keys.due, '-inf', text(now), 'LIMIT', 0, args[2])) do
    local known = redis.call('HGET', keys.holds, id)
    if known and string.sub(known, 1, 1) == 'O' then
      local amount, account, boot, record, taken, model = unpack(cmsgpack.unpack(string.sub(known, 2)), 1, 6)
      local cost = redis.call('HGET', keys.costs, id) or '0'
      less(money, 'h' .. account, amount)
      add(money, 'c' .. account, amount)
      redis.call('XADD', base .. ':outbox', '*', 'r', record, 'p', 'X ' .. boot .. ' ' .. cost)
      -- Its tokens count as reserved, its money as far as is known.
      give_back(base, id, taken, amount, cost, '0', model, '')
      close(keys, id, 'X' .. amount .. ' ' .. amount .. ' 0', now)
      reaped[#reaped + 1] = id
    else
      redis.call('ZREM', keys.due, id)
    end
  end
  return reaped
end

function verbs.fence(base)
  return { fence(base) }
end

-- run epoch: from now on this process spends under this number. What it held under others is gone.
function verbs.mark(base, args)
  local money = base .. ':money'
  local before = redis.call('HGET', money, 'epoch')
  if args[1] ~= me() or (before and covers(before, args[2])) then return { 'STALE', fence(base) } end
  redis.call('UNLINK', money)
  if before then
    for _, key in pairs(of_epoch(base, before)) do redis.call('UNLINK', key) end
  end
  redis.call('HSET', money, 'run', args[1], 'epoch', args[2])
  return { 'OK' }
end

-- epoch account total: all that the ledger has ever leased to this pool. Only ever raises.
function verbs.install(base, args)
  local epoch, account, total = unpack(args, 1, 3)
  local refused = stale(base, epoch)
  if refused then return refused end
  local money = base .. ':money'
  local installed = redis.call('HGET', money, 'i' .. account) or '0'
  if not covers(installed, total) then
    less(money, 'a' .. account, installed)
    add(money, 'a' .. account, total)
    redis.call('HSET', money, 'i' .. account, total)
  end
  return { 'OK', installed }
end

-- epoch account at_most: takes free money out for good
function verbs.recall(base, args)
  local epoch, account, at_most = unpack(args, 1, 3)
  local refused = stale(base, epoch)
  if refused then return refused end
  local money = base .. ':money'
  local available = redis.call('HGET', money, 'a' .. account) or '0'
  local part = covers(available, at_most) and at_most or available
  less(money, 'a' .. account, part)
  add(money, 'r' .. account, part)
  return { 'OK', part, redis.call('HGET', money, 'r' .. account) or '0' }
end

-- epoch account
function verbs.pool(base, args)
  local refused = stale(base, args[1])
  if refused then return refused end
  local answer = { 'OK' }
  for _, kind in ipairs({ 'i', 'a', 'h', 'c', 'r' }) do
    answer[#answer + 1] = redis.call('HGET', base .. ':money', kind .. args[2]) or '0'
  end
  return answer
end

-- amount (scope window)...: money spent elsewhere in windows that are known here
function verbs.spent(base, args)
  for i = 2, #args, 2 do
    correct_budget(base .. ':b:' .. args[i] .. ':' .. args[i + 1], '0', args[1], '0')
  end
  return { 'OK' }
end

-- How many entries nobody has read yet are as old as that, `most` at most.
local function unread(key, fresh_ms, most)
  if fresh_ms == '0' then return most end
  -- By the clock that numbers a stream's entries.
  local before = text(redis.call('TIME')[1] * 1000 - tonumber(fresh_ms))
  local read = '0-0'
  local groups = redis.call('XINFO', 'GROUPS', key)
  for _, group in ipairs(groups) do
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then read = group[i + 1] end
    end
  end
  return #redis.call('XRANGE', key, '(' .. read, before, 'COUNT', most)
end

-- epoch holds...: the ledger has the ends of these, from the node that ended them
function verbs.booked(base, args)
  local refused = stale(base, args[1])
  if refused then return refused end
  local entries = {}
  for _, known in ipairs(redis.call('HMGET', of_epoch(base, args[1]).holds, unpack(args, 2))) do
    entries[#entries + 1] = known and string.match(known, '^E.* (%d+%-%d+)$') or nil
  end
  if #entries > 0 then
    local key = base .. ':outbox'
    -- Nobody has read it where there is no group yet.
    redis.pcall('XACK', key, 'ledger', unpack(entries))
    redis.call('XDEL', key, unpack(entries))
  end
  return { 'OK' }
end

-- consumer count idle_ms fresh_ms: what nobody has read yet is read once it is that old
function verbs.outbox(base, args)
  local key, consumer, most = base .. ':outbox', args[1], tonumber(args[2])
  local found = { 'OK' }
  if redis.call('EXISTS', key) == 0 then return found end
  -- It is there already, but for the first time.
  redis.pcall('XGROUP', 'CREATE', key, 'ledger', '0')
  redis.call('XAUTOCLAIM', key, 'ledger', consumer, args[3], '0-0', 'COUNT', most, 'JUSTID')
  -- Its own first: what it has read before and not acknowledged, and what others left.
  for _, from in ipairs({ '0', '>' }) do
    local rest = most - (#found - 1) / 3
    if from == '>' and rest > 0 then rest = unread(key, args[4], rest) end
    local streams = rest > 0
      and redis.call('XREADGROUP', 'GROUP', 'ledger', consumer, 'COUNT', rest, 'STREAMS', key, from)
    for _, entry in ipairs(streams and streams[1][2] or {}) do
      if entry[2] then
        for _, value in ipairs({ entry[1], entry[2][2], entry[2][4] }) do found[#found + 1] = value end
      else
        redis.call('XACK', key, 'ledger', entry[1])
      end
    end
  end
  return found
end

-- ids: the ledger has them
function verbs.acknowledge(base, args)
  local key = base .. ':outbox'
  redis.call('XACK', key, 'ledger', unpack(args))
  redis.call('XDEL', key, unpack(args))
  return { 'OK' }
end
