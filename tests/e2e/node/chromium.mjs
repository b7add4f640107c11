// A browser to look at pages with, by the protocol of its developer tools: no package stands between.

import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { accessSync, constants } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

const NAMES = ['chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome'];
// Without them it looks for the servers of its maker, again and again.
const QUIET = ['--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-quic',
  '--no-first-run', '--no-default-browser-check', '--disable-gpu', '--disable-extensions'];
const PATIENCE_MS = 30_000;

/** The browser's file, if one is installed. */
export function binary() {
  const places = (process.env.PATH ?? '').split(delimiter).flatMap((folder) => NAMES.map((name) => join(folder, name)));
  return places.find((place) => {
    try {
      accessSync(place, constants.X_OK);
      return true;
    } catch {
      return false;
    }
  });
}

export class Browser {
  static async start() {
    const browser = new Browser();
    browser.profile = mkdtempSync(join(tmpdir(), 'tollgate-browser-'));
    // The sandbox needs rights that a container does not give; the page is ours. A group of its own: it starts many
    // processes, and not all of them end with the first one.
    const options = ['--headless', '--no-sandbox', ...QUIET, '--remote-debugging-port=0', `--user-data-dir=${browser.profile}`];
    browser.process = spawn(binary(), [...options, 'about:blank'], { stdio: 'ignore', detached: true });
    browser.socket = new WebSocket(await browser.address());
    await new Promise((done, failed) => Object.assign(browser.socket, { onopen: done, onerror: failed }));
    Object.assign(browser, { number: 0, waiting: new Map(), listeners: [] });
    browser.socket.onmessage = ({ data }) => browser.hear(JSON.parse(data));
    return browser;
  }

  async address() {
    for (const end = Date.now() + PATIENCE_MS; Date.now() < end; await sleep(50)) {
      try {
        const [port, path] = readFileSync(join(this.profile, 'DevToolsActivePort'), 'utf8').split('\n');
        if (path) return `ws://127.0.0.1:${port}${path}`;
      } catch {
        // It is not there yet.
      }
    }
    throw new Error('the browser did not start');
  }

  hear({ id, result, error, method, params, sessionId }) {
    if (id) {
      const [done, failed] = this.waiting.get(id);
      this.waiting.delete(id);
      error ? failed(new Error(error.message)) : done(result);
    } else {
      this.listeners = this.listeners.filter((listener) => !listener(method, params, sessionId));
    }
  }

  send(method, params = {}, sessionId = undefined) {
    const id = ++this.number;
    this.socket.send(JSON.stringify({ id, method, params, sessionId }));
    return new Promise((done, failed) => this.waiting.set(id, [done, failed]));
  }

  once(event, session) {
    return new Promise((done) => this.listeners.push((method, params, from) => method === event && from === session && (done(params), true)));
  }

  /** A page of this size that likes light or dark. */
  async page({ width = 1280, height = 900, dark = false, scripts = true } = {}) {
    const { targetId } = await this.send('Target.createTarget', { url: 'about:blank' });
    const { sessionId } = await this.send('Target.attachToTarget', { targetId, flatten: true });
    const page = new Page(this, sessionId, targetId);
    await page.send('Page.enable');
    // Answers may be kept for some seconds; a test wants the one of now.
    await page.send('Network.enable');
    await page.send('Network.setCacheDisabled', { cacheDisabled: true });
    await page.send('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: 1, mobile: width < 500 });
    const features = [{ name: 'prefers-color-scheme', value: dark ? 'dark' : 'light' }];
    await page.send('Emulation.setEmulatedMedia', { features });
    if (!scripts) await page.send('Emulation.setScriptExecutionDisabled', { value: true });
    return page;
  }

  stop() {
    this.socket.close();
    try {
      process.kill(-this.process.pid, 'SIGKILL');
    } catch {
      // It has gone by itself.
    }
    rmSync(this.profile, { recursive: true, force: true, maxRetries: 20 });
  }
}

class Page {
  constructor(browser, session, target) {
    Object.assign(this, { browser, session, target });
  }

  send(method, params) {
    return this.browser.send(method, params, this.session);
  }

  async open(url) {
    const loaded = this.browser.once('Page.loadEventFired', this.session);
    const { errorText } = await this.send('Page.navigate', { url });
    if (errorText) throw new Error(`${url}: ${errorText}`);
    await loaded;
  }

  /** What an expression is worth, once it is there. */
  async ask(expression) {
    const { result, exceptionDetails } = await this.send('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  /** A picture of the whole page, in PNG. */
  async picture() {
    const { data } = await this.send('Page.captureScreenshot', { format: 'png', captureBeyondViewport: true });
    return Buffer.from(data, 'base64');
  }

  close() {
    return this.browser.send('Target.closeTarget', { targetId: this.target });
  }
}
