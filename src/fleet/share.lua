
-- What nodes share beside money: verbs behind those of `store/redis/library.lua`. All keys begin with the base of one
-- shard:
--   places   hash    endpoint -> its breaker, weight and rest, and whose turn it is to probe; JSON
--   rests    hash    credential -> how it rests; JSON
--   gates    hash    model -> whose turn it is to try as a last resort; JSON
--   tellers  hash    node -> the number of its last telling, and when it came
--   health   channel what has changed
-- What nobody has touched for an hour is forgotten.
--
-- The rules are those of `filters/src/upstream/{breaker,weight,fleet}.rs`; `tests/it/health.rs` compares them. Times are
-- milliseconds of the server's clock, and durations when they leave it.

local FORGET_MS = 3600000
-- A node that was refused a claim comes before who had it, as long as it keeps asking.
local WAITS_MS = 1000
local TERM_MS = 2000
local ROW_MAX = 10
local CALLS_MIN = 10
local OPEN_MIN_MS = 10000
local OPEN_MAX_MS = 300000
local FORGIVE_MS = 300000
local PROBES = 3
local PRIOR = 5

local function never_seen(now)
  return {
    -- breaker: generation, phase (closed, open, half), end of the open time, openings, closed since, row, probes
    g = '0', p = 'c', u = 0, n = 0, c = now, k = 0, hs = 0, by = false, w = {},
    -- weight: good, bad, fast, as of; reopened at, failed at, successes since
    hg = 0, hb = 0, hf = 1, ha = now, ho = 0, hx = 0, hr = 0,
    -- rest
    r = 0,
    -- claim: owner, until, who waits, since
    lo = '', lu = 0, lw = '', la = 0,
  }
end

-- Answers for how many ms the node has it.
local function claim(it, node, now, ask, ms)
  local mine = it.lo == node
  local free = it.lo == '' or it.lu <= now
  local another_waits = it.lw ~= '' and it.lw ~= node and now - it.la < WAITS_MS
  if ask == 'free' then
    if mine then it.lo, it.lu = '', 0 end
    return 0
  end
  if ask == 'hold' then
    if not (mine or free) then return 0 end
    it.lo, it.lu = node, now + ms
    return ms
  end
  if not (mine or free) then
    it.lw, it.la = node, now
    return 0
  end
  if another_waits then
    if mine then it.lo, it.lu = '', 0 end
    return 0
  end
  if it.lw == node then it.lw = '' end
  it.lo, it.lu = node, now + TERM_MS
  return TERM_MS
end

local function fade(it, now)
  local idle = math.max(now - it.ha, 0) / 1000
  local slow = 2 ^ (-idle / 60)
  it.hg, it.hb, it.ha = it.hg * slow, it.hb * slow, now
  it.hf = 1 - (1 - it.hf) * 2 ^ (-idle / 15)
end

local function weigh(it, now, t)
  fade(it, now)
  local calls = t.good + t.bad
  if calls == 0 then return end
  local fade = 0.99 ^ calls
  local each = (1 - fade) / 0.01 / calls
  it.hg, it.hb = it.hg * fade + t.good * each, it.hb * fade + t.bad * each
  it.hf = it.hf * 0.75 ^ ((t.units - t.tail) / 2)
  it.hf = 1 - (1 - it.hf) * 0.75 ^ t.good
  it.hf = it.hf * 0.75 ^ (t.tail / 2)
  if t.bad > 0 then it.hr, it.hx = t.streak, now else it.hr = it.hr + t.good end
  local good = it.hg + PRIOR
  local factor = math.min((good / (good + it.hb)) ^ 6, it.hf)
  if it.hx > 0 and now - it.hx >= 10000 and it.hr >= 12 and factor < 0.9 then
    it.hg, it.hb, it.hf, it.ho, it.hx, it.hr = 0, 0, 1, now, 0, 0
  end
end

-- A generation is a time in microseconds, so that it grows even over a loss of memory.
local function turn(it, micros)
  it.g = text(math.max(tonumber(it.g) + 1, micros))
end

local function open(it, now, micros, chance, by_rate)
  if it.p == 'c' then it.n = math.max(it.n - math.floor((now - it.c) / FORGIVE_MS), 0) end
  local span = math.min(OPEN_MIN_MS * 2 ^ math.min(it.n, 5), OPEN_MAX_MS)
  it.p, it.by, it.n = 'o', by_rate, it.n + 1
  it.u = now + math.floor(math.min(span * (0.8 + 0.4 * chance), OPEN_MAX_MS))
  turn(it, micros)
end

local function count(it, now, t)
  local second = math.floor(now / 1000)
  local good, bad = 0, 0
  for at, calls in pairs(it.w) do
    if tonumber(at) <= second - 60 then it.w[at] = nil
    else good, bad = good + calls[1], bad + calls[2] end
  end
  local at = text(second)
  local calls = it.w[at] or { 0, 0 }
  it.w[at] = { calls[1] + t.good, calls[2] + t.bad }
  return good + t.good, bad + t.bad
end

local function judge(it, now, micros, chance, t)
  if t.generation ~= it.g then return end
  if t.check_passed and it.p == 'o' and now < it.u then
    it.u = now
    turn(it, micros)
  end
  if t.good + t.bad == 0 then return end
  if it.p == 'c' then
    local good, bad = count(it, now, t)
    it.k = t.good > 0 and t.tail or it.k + t.units
    if it.k >= ROW_MAX then open(it, now, micros, chance, false)
    elseif t.bad > 0 and not t.needed and good + bad >= CALLS_MIN and bad * 2 > good + bad then
      open(it, now, micros, chance, true)
    end
    return
  end
  -- A last resort that fails in the open time was told to try.
  if t.good == 0 and it.p == 'o' and now < it.u then return end
  if t.bad > 0 then return open(it, now, micros, chance, it.by) end
  it.hs = (it.p == 'h' and it.hs or 0) + t.good
  it.p = 'h'
  if it.hs >= PROBES then
    it.p, it.c, it.k, it.hs, it.w, it.by = 'c', now, 0, 0, {}, false
    it.hg, it.hb, it.hf, it.ho, it.hx, it.hr = 0, 0, 1, now, 0, 0
    turn(it, micros)
  end
end

local function place_word(it, now)
  fade(it, now)
  local left = it.p == 'o' and math.max(it.u - now, 0) or it.hs
  return {
    generation = it.g, phase = it.p, left = left, by_rate = it.by, openings = it.n,
    rest = math.max(it.r - now, 0), good = it.hg, bad = it.hb, fast = it.hf,
    reopened = it.ho > 0 and math.max(now - it.ho, 0) or -1,
  }
end

local function rest_word(it, now)
  return { cause = it.cause, left = math.max(it.u - now, 0), times = it.times }
end

local function load(key, name)
  local found = redis.call('HGET', key, name)
  return found and cjson.decode(found)
end

local function keep(key, name, it, now)
  it.at = now
  redis.call('HSET', key, name, cjson.encode(it))
end

-- All of a hash that are not forgotten, for `word` to look at.
local function each(key, now, word)
  local all = redis.call('HGETALL', key)
  local found = {}
  for i = 1, #all, 2 do
    local it = cjson.decode(all[i + 1])
    if now - it.at > FORGET_MS then redis.call('HDEL', key, all[i])
    else found[all[i]] = word(it, now) end
  end
  return found
end

-- telling: JSON of `fleet::health::Telling`; the answer is JSON of its `Answer`
function verbs.tell(base, args)
  local told = cjson.decode(args[1])
  local time = redis.call('TIME')
  local now, micros = clock(base), time[1] * 1000000 + time[2]
  local places, rests, gates, tellers = base .. ':places', base .. ':rests', base .. ':gates', base .. ':tellers'
  local last = load(tellers, told.node)
  -- One that was not answered is told again.
  local is_news = not last or last.number < told.number
  local answer = { places = {}, rests = {}, claims = {}, gates = {} }
  local changed = { places = {}, rests = {}, served = {} }
  local anything = false
  for name, t in pairs(told.places) do
    local it = load(places, name) or never_seen(now)
    local before = it.g .. it.p .. it.hs
    if is_news then
      weigh(it, now, t)
      judge(it, now, micros, told.chance, t)
      if t.rest > 0 and it.r < now + t.rest then
        it.r = now + t.rest
        before = nil
      end
    end
    if t.ask then
      local may = it.p == 'h' or (it.p == 'o' and it.u <= now) or t.ask ~= 'want'
      answer.claims[name] = may and claim(it, told.node, now, t.ask, t.hold) or 0
    end
    keep(places, name, it, now)
    answer.places[name] = place_word(it, now)
    if before ~= it.g .. it.p .. it.hs then
      anything, changed.places[name] = true, answer.places[name]
    end
  end
  for name, t in pairs(told.rests) do
    local it = load(rests, name)
    if not it or it.u < now + t.left then
      it = { u = now + t.left, cause = t.cause, times = t.times }
      keep(rests, name, it, now)
      anything, changed.rests[name] = true, rest_word(it, now)
    end
  end
  for name in pairs(told.served) do
    local it = load(rests, name)
    if it and it.u <= now then
      redis.call('HDEL', rests, name)
      anything, changed.served[name] = true, true
    end
  end
  for name, t in pairs(told.gates) do
    local it = load(gates, name) or { lo = '', lu = 0, lw = '', la = 0 }
    answer.gates[name] = claim(it, told.node, now, t.ask, t.hold)
    keep(gates, name, it, now)
  end
  if told.all then
    answer.places, answer.rests = each(places, now, place_word), each(rests, now, rest_word)
    each(gates, now, function() return true end)
    each(tellers, now, function() return true end)
  end
  keep(tellers, told.node, { number = told.number }, now)
  if anything then redis.call('PUBLISH', base .. ':health', cjson.encode(changed)) end
  return { 'OK', cjson.encode(answer) }
end

-- Keys that have changed:
--   keys     stream  <number>-0: f the number before it, r the key's record; the latest ones
--   keys     channel what was just added
local KEYS_KEPT = 10000

local function keys_tail(base)
  local last = redis.call('XREVRANGE', base .. ':keys', '+', '-', 'COUNT', 1)[1]
  return last and string.match(last[1], '^%d+') or ''
end

-- number limit; answers the latest number there is, and changes after the one that was named
function verbs.keys_since(base, args)
  local found = { 'OK', keys_tail(base) }
  local changes = redis.call('XRANGE', base .. ':keys', '(' .. args[1] .. '-0', '+', 'COUNT', args[2])
  for _, change in ipairs(changes) do
    found[#found + 1] = change[2][2]
    found[#found + 1] = string.match(change[1], '^%d+')
    found[#found + 1] = change[2][4]
  end
  return found
end

-- tail from (number record)...: only if nobody has added anything behind that tail
function verbs.keys_add(base, args)
  if keys_tail(base) ~= args[1] then return { 'OK', 'late' } end
  local from = args[2]
  local added = {}
  for i = 3, #args, 2 do
    redis.call('XADD', base .. ':keys', 'MAXLEN', '~', KEYS_KEPT, args[i] .. '-0', 'f', from, 'r', args[i + 1])
    added[#added + 1] = { from = from, number = args[i], record = args[i + 1] }
    from = args[i]
  end
  redis.call('PUBLISH', base .. ':keys', cjson.encode(added))
  return { 'OK', 'added' }
end

-- The catalogue:
--   catalogue  hash     version, text
--   catalogue  channel  its version, when it is new

-- known; answers the version, and the text where it is newer
function verbs.catalogue(base, args)
  local kept = redis.call('HMGET', base .. ':catalogue', 'version', 'text')
  if not kept[1] then return { 'OK', '' } end
  if tonumber(kept[1]) <= tonumber(args[1]) then return { 'OK', kept[1] } end
  return { 'OK', kept[1], kept[2] }
end

-- version text
function verbs.publish_catalogue(base, args)
  local version = redis.call('HGET', base .. ':catalogue', 'version')
  if version and tonumber(version) >= tonumber(args[1]) then return { 'OK' } end
  redis.call('HSET', base .. ':catalogue', 'version', args[1], 'text', args[2])
  redis.call('PUBLISH', base .. ':catalogue', args[1])
  return { 'OK' }
end
