// The status page in a real browser: what it shows, on a phone and in the dark, in three languages; and that axe-core
// finds nothing that keeps anybody from reading it.
//
// With E2E_PICTURES it leaves a picture of each page in that folder.

import assert from 'node:assert/strict';
import { readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { Browser } from './chromium.mjs';
import { WORLD } from './stand.mjs';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
// Days are read every half minute.
const PATIENCE_MS = 45_000;
const VIEWS = {
  light: {},
  dark: { dark: true },
  phone: { width: 320, height: 640 },
  'phone-dark': { width: 320, height: 640, dark: true },
};
const LANGUAGES = { en: 'ltr', ar: 'rtl', fa: 'rtl' };
const { gateway, admin, token, key, mock } = WORLD.status;

let browser;
before(async () => { browser = await Browser.start(); });
after(() => browser?.stop());

/** Opens the page in one of the views. */
async function open(view, language) {
  const page = await browser.page(VIEWS[view]);
  await page.open(`${gateway}/status?lang=${language}`);
  return page;
}

/** Looks at the page in every view and language. */
async function lookAt(what, languages = Object.keys(LANGUAGES), views = Object.keys(VIEWS)) {
  for (const language of languages) {
    for (const view of views) {
      const page = await open(view, language);
      const name = `${what}-${language}-${view}`;
      await page.ask('document.querySelectorAll("details").forEach((details) => { details.open = true; })');
      if (process.env.E2E_PICTURES) writeFileSync(join(process.env.E2E_PICTURES, `status-${name}.png`), await page.picture());
      assert.equal(await page.ask('document.documentElement.dir'), LANGUAGES[language]);
      const wide = await page.ask('document.documentElement.scrollWidth - document.documentElement.clientWidth');
      assert.ok(wide <= 0, `${name} is ${wide} px too wide`);
      await page.ask(AXE);
      const found = await page.ask(`axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) =>
        violations.map(({ id, help, nodes }) => id + ': ' + help + ' ' + nodes.slice(0, 3).map((node) => node.html + ' ' + node.failureSummary)))`);
      assert.deepEqual(found, [], name);
      await page.close();
    }
  }
}

async function status(wanted) {
  let found;
  for (const end = Date.now() + PATIENCE_MS; Date.now() < end; await sleep(100)) {
    found = await (await fetch(`${gateway}/status.json`)).json();
    if (wanted(found)) return found;
  }
  assert.fail(JSON.stringify(found));
}

async function incidents(verb) {
  const headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
  const answer = await fetch(`${admin}/incidents`, { method: 'POST', headers, body: JSON.stringify(verb) });
  assert.equal(answer.status, 200, await answer.clone().text());
  return answer.json();
}

async function call(model) {
  const body = JSON.stringify({ model, messages: [{ role: 'user', content: 'hi' }] });
  const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
  const answer = await fetch(`${gateway}/v1/chat/completions`, { method: 'POST', headers, body });
  await answer.text();
  return answer.status;
}

async function play(script) {
  await fetch(`${mock}/__mock/script`, { method: 'PUT', body: JSON.stringify({ dialect: 'openai', ...script }) });
}

test('nothing is known yet', async () => {
  await status((json) => json.models.length > 0 && json.status === 'no_data');
  await lookAt('no-data', undefined, ['light', 'dark', 'phone']);
});

test('all is well', async () => {
  const { models } = await (await fetch(`${gateway}/status.json`)).json();
  for (const { name } of models) assert.equal(await call(name), 200);
  await status((json) => json.models.every((model) => model.status === 'operational'));
  const { models: kept } = await status((json) => json.models.some((model) => model.good_90d !== null));
  const { regions } = kept.find((model) => model.name === 'aurora-large');
  assert.deepEqual(regions.map((region) => region.name), ['eu-west', 'us-east']);
  const [west, east] = regions.map((region) => region.days.map((day) => day.status).join());
  assert.notEqual(west, east, 'each has its own days');
  await lookAt('good');
});

test('one route fails and another serves: degraded, while callers get their answers', async () => {
  await play({ fault: { kind: 'status', code: 500 } });
  for (let calls = 0; calls < 12; calls++) assert.equal(await call('aurora-large'), 200);
  await status((json) => json.models.some((model) => model.status === 'degraded'));
  await lookAt('degraded', ['en'], ['light']);
});

test('an incident is told in three languages, and what somebody writes is text', async () => {
  await incidents({
    verb: 'open',
    title: { en: 'Answers are slow in eu-west <script>alert(1)</script>', ar: 'الإجابات بطيئة في eu-west', fa: 'پاسخ‌ها در eu-west کندند' },
    text: {
      en: 'An upstream answers late.\nWe send calls to another region meanwhile.',
      ar: 'أحد المزوّدين يجيب متأخرًا.\nنرسل الطلبات إلى منطقة أخرى في هذه الأثناء.',
      fa: 'یکی از بالادست‌ها دیر پاسخ می‌دهد.\nتا آن زمان درخواست‌ها را به منطقهٔ دیگری می‌فرستیم.',
    },
    severity: 'partly_down',
    models: ['aurora-large', 'aurora-small'],
  });
  await status((json) => json.incidents.some((incident) => !incident.closed_at));
  const page = await open('light', 'en');
  assert.equal(await page.ask('document.scripts.length'), 0);
  const titles = await page.ask('[...document.querySelectorAll(".incident h3")].map((title) => title.textContent)');
  assert.ok(titles.includes('Answers are slow in eu-west <script>alert(1)</script>'), titles.join());
  await page.close();
  await lookAt('incident');
});

test('what is over is among the past', async () => {
  const [{ id }] = await incidents({ verb: 'list' });
  await incidents({ verb: 'close', id, text: { en: 'All regions answer as usual.' } });
  await status((json) => json.incidents.find((incident) => incident.id === id).closed_at);
  await lookAt('past', ['en', 'fa'], ['light', 'phone']);
});

test('a page of many models with hard names fits a phone', async () => {
  const many = await browser.page(VIEWS.phone);
  await many.open(`${WORLD.gateway}/status?lang=en`);
  const wide = await many.ask('document.documentElement.scrollWidth - document.documentElement.clientWidth');
  assert.ok(wide <= 0, `${wide} px too wide`);
  await many.close();
});

test('every bar has its text, shown where a pointer is', async () => {
  const page = await open('light', 'en');
  const rows = await page.ask(`[...document.querySelectorAll('.days')].map((days) =>
    [days.children.length, [...days.children].filter((day) => day.textContent.trim()).length])`);
  // Four models; two of them have two regions, two have one.
  assert.deepEqual(rows, Array(4 + 6).fill([90, 90]));
  for (const row of ['.model > .days', '.regions .days']) {
    const place = await page.ask(`(() => { const day = document.querySelector('${row} li:last-child').getBoundingClientRect();
      return { x: day.x + day.width / 2, y: day.y + day.height / 2 }; })()`);
    await page.send('Input.dispatchMouseEvent', { type: 'mouseMoved', ...place });
    const [width, seen] = await page.ask(`(() => { const text = document.querySelector('${row} li:last-child span');
      const place = text.getBoundingClientRect();
      return [place.width, document.elementFromPoint(place.x + place.width / 2, place.y + place.height - 2) === text]; })()`);
    assert.ok(width > 100 && seen, `${row}: ${width} px wide, ${seen ? 'on top' : 'covered'}`);
  }
  await page.close();
});

test('the page needs no script, and asks nobody else for anything', async () => {
  const page = await browser.page({ scripts: false });
  const asked = [];
  browser.listeners.push((method, params, session) => {
    if (method === 'Network.requestWillBeSent' && session === page.session) asked.push(params.request.url);
    return false;
  });
  await page.open(`${gateway}/status`);
  assert.deepEqual(asked.filter((url) => !url.startsWith('data:')), [`${gateway}/status`]);
  const { root } = await page.send('DOM.getDocument', { depth: 1 });
  const { nodeId } = await page.send('DOM.querySelector', { nodeId: root.nodeId, selector: 'h1' });
  assert.ok(nodeId > 0, 'it is there without scripts');
  await page.close();
});

test('whoever uses a keyboard sees where they are', async () => {
  const page = await open('light', 'en');
  const key = { key: 'Tab', code: 'Tab', windowsVirtualKeyCode: 9 };
  const focused = [];
  for (let presses = 0; presses < 5; presses++) {
    await page.send('Input.dispatchKeyEvent', { type: 'keyDown', ...key });
    await page.send('Input.dispatchKeyEvent', { type: 'keyUp', ...key });
    focused.push(await page.ask('(({ outlineStyle, outlineWidth }) => [outlineStyle, parseFloat(outlineWidth)])(getComputedStyle(document.activeElement))'));
  }
  for (const [style, width] of focused) assert.ok(style !== 'none' && width >= 2, JSON.stringify(focused));
  await page.close();
});
