// What every test stands on: clients, its own models and account, the scripted upstreams, the books.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';

export const WORLD = JSON.parse(readFileSync(process.env.E2E_WORLD, 'utf8'));
// How long something that has to happen may take.
const PATIENCE_MS = 20_000;
// What ten tokens in and five out cost: the mock's usual answer.
export const USUAL_COST_NANO = 10 * 2_500 + 5 * 10_000;

let indices = 0;

/** One scripted provider, and what it was asked since the test began. */
class Upstream {
  static async of(url, dialect) {
    const upstream = new Upstream();
    Object.assign(upstream, { url, dialect });
    await upstream.play({});
    upstream.before = await upstream.counts();
    return upstream;
  }

  async play(script) {
    const body = JSON.stringify({ dialect: this.dialect, ...script });
    const answer = await fetch(`${this.url}/__mock/script`, { method: 'PUT', body });
    assert.equal(answer.status, 204, await answer.text());
  }

  async counts() {
    return (await fetch(`${this.url}/__mock/counts`)).json();
  }

  async calls() {
    return (await this.counts()).requests - this.before.requests;
  }

  async left() {
    return (await this.counts()).disconnects - this.before.disconnects;
  }

  /** The bodies, as JSON. */
  async asked() {
    const calls = await this.calls();
    const seen = await (await fetch(`${this.url}/__mock/requests`)).json();
    return seen.slice(seen.length - calls).map((one) => JSON.parse(one.body));
  }
}

/** What one test has for itself. */
export class Stand {
  static async make(dialect) {
    assert.ok(indices < WORLD.indices, 'more tests than indices: raise INDICES in stage.py');
    const index = String(indices++).padStart(3, '0');
    const stand = new Stand();
    const [upstream, standby] = await Promise.all(WORLD.mocks[dialect].map((url) => Upstream.of(url, dialect)));
    const models = { solo: `solo-${dialect}-${index}`, pair: `pair-${dialect}-${index}`, slashed: `reseller/${dialect}-${index}:free` };
    return Object.assign(stand, { dialect, upstream, standby, key: `sk-caller-${index}` }, models);
  }

  /** A client that never asks twice, unless it is told to. */
  client({ base = WORLD.gateway, ...options } = {}) {
    const common = { apiKey: this.key, maxRetries: 0, timeout: 60_000, ...options };
    return this.dialect === 'openai'
      ? new OpenAI({ baseURL: `${base}/v1`, ...common })
      : new Anthropic({ baseURL: base, ...common });
  }

  /** What the account has paid, once nothing is set aside for it any more. */
  async settled() {
    const ask = async () => {
      const answer = await fetch(`${WORLD.gateway}/v1/credits`, { headers: { authorization: `Bearer ${this.key}` } });
      return (await answer.json()).data;
    };
    await eventually(() => metric('tollgate_holds_open'), 0, 'every hold is settled');
    await eventually(async () => {
      const found = await ask();
      return found.available_nano - found.balance_nano;
    }, 0, 'nothing is set aside');
    return Math.round((await ask()).total_usage * 1e9);
  }

  async paid(nano) {
    await eventually(() => this.settled(), nano, 'what the account paid');
  }
}

export async function eventually(ask, expected, what) {
  const deadline = performance.now() + PATIENCE_MS;
  let found = await ask();
  while (found !== expected && performance.now() < deadline) {
    await sleep(20);
    found = await ask();
  }
  assert.equal(found, expected, what);
}

/** The sum of a metric's samples with these labels; zero if there is none. */
export async function metric(name, labels = {}) {
  const text = await (await fetch(`${WORLD.admin}/metrics`)).text();
  const samples = text.split('\n').filter((line) => line.split(/[{ ]/)[0] === name);
  const wanted = samples.filter((line) => Object.entries(labels).every(([label, value]) => line.includes(`${label}="${value}"`)));
  return wanted.reduce((sum, line) => sum + Number(line.split(' ').at(-1)), 0);
}

export async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}
