// The live view: the feed of snapshots from /api/mesh, read again and again with growing pauses, and what it fills in.

import { Failure, ask, events } from "./events.js";
import { element } from "./markdown.js";
import { Timeline, drawLine, milliseconds } from "./timeline.js";

const INTERVAL_S = 0.5;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
const HISTORY = 240; // snapshots that the small lines show: two minutes

const byId = (id) => document.getElementById(id);
const say = (id, text) => {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
};
const count = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export class Mesh {
  // `onKeyNeeded` gets the gateway's words when it wants a key.
  constructor({ onKeyNeeded }) {
    this.onKeyNeeded = onKeyNeeded;
    this.timeline = new Timeline(byId("timeline"), byId("tip"));
    this.history = { output: [], prefill: [], queue: [] };
    this.epoch = null;
    this.base = null; // the engine's clock at the first snapshot: differences are small numbers
    this.feed = null; // the AbortController of the feed
    this.last = null;
    byId("window").addEventListener("change", (event) => {
      const chosen = event.target.value;
      this.timeline.setWindow(chosen === "auto" ? null : Number(chosen));
    });
    byId("pause").addEventListener("click", () => {
      const pausing = byId("pause").getAttribute("aria-pressed") !== "true";
      byId("pause").setAttribute("aria-pressed", String(pausing));
      this.timeline.pause(pausing);
    });
    // Nobody looks: then nobody has to collect.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    new ResizeObserver(() => this.drawLines()).observe(byId("mesh"));
  }

  start() {
    if (this.feed || document.hidden) return;
    this.feed = new AbortController();
    this.run(this.feed.signal);
  }

  stop() {
    this.feed?.abort();
    this.feed = null;
  }

  // The key or something else has changed: begin again at once.
  restart() {
    this.stop();
    this.start();
  }

  async run(signal) {
    let pause = FIRST_PAUSE_MS;
    while (!signal.aborted) {
      try {
        const response = await ask(`/api/mesh?interval_s=${INTERVAL_S}`, { signal });
        for await (const data of events(response)) {
          if (signal.aborted) return;
          pause = FIRST_PAUSE_MS;
          this.take(JSON.parse(data));
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof Failure)) console.error(error);
        this.lost(error);
        if (error.status === 401) {
          this.feed = null;
          this.onKeyNeeded(error.message);
          return; // until there is another key
        }
      }
      await delay(pause * (0.75 + Math.random() / 2), signal);
      pause = Math.min(LONGEST_PAUSE_MS, pause * 2);
    }
  }

  lost(error) {
    const needsKey = error.status === 401;
    this.showState(needsKey ? "locked" : "lost", needsKey ? "key needed" : "reconnecting");
    this.notice(needsKey ? "An API key is needed to see the mesh." : `${error.message} Trying again …`);
    document.body.toggleAttribute("data-stale", true);
  }

  showState(state, text) {
    byId("state").dataset.state = state;
    say("state-text", text);
  }

  notice(text) {
    byId("mesh-notice").hidden = !text;
    say("mesh-notice", text);
  }

  take(snapshot) {
    const { engine } = snapshot;
    const { status } = engine;
    this.last = snapshot;
    document.body.toggleAttribute("data-stale", false);
    this.showState(status.ready ? "ready" : "waiting", status.ready ? "ready" : "not ready");
    this.notice(status.ready ? "" : sentence(status.reason));
    this.takeSteps(engine);
    this.remember("output", engine.output_tokens_per_s);
    this.remember("prefill", engine.prefill_tokens_per_s);
    this.remember("queue", status.num_running + status.num_waiting);
    this.showFacts(snapshot);
    this.showTiles(engine);
    this.showCache(status);
    this.showQueue(snapshot);
    this.showWorkers(status);
    this.drawLines();
  }

  takeSteps(engine) {
    const { status } = engine;
    if (!engine.taken_ns) return;
    if (status.ready && this.epoch !== status.epoch) {
      this.epoch = status.epoch;
      this.base = engine.taken_ns;
      this.timeline.clear(engine.stages.map(({ stage }) => stage));
    }
    if (this.base === null) return;
    const taken = (engine.taken_ns - this.base) / 1e6;
    const stages = engine.stages.map((columns) => ({
      stage: columns.stage,
      steps: columns.step_ids.map((id, at) => ({
        id,
        received: taken - columns.received_us_ago[at] / 1000,
        started: taken - columns.started_us_ago[at] / 1000,
        ended: taken - columns.ended_us_ago[at] / 1000,
        sequences: columns.num_sequences[at],
        tokens: columns.num_tokens[at],
        decode: columns.num_decode_tokens[at],
      })),
    }));
    this.timeline.add(stages, taken, INTERVAL_S * 1000);
    const busy = stages.map(({ stage }) => `stage ${stage} ${Math.round(100 * this.timeline.busy(stage))} % busy`);
    byId("timeline").setAttribute("aria-label", `Iterations over time: ${busy.join(", ") || "none yet"}`);
  }

  remember(name, value) {
    const values = this.history[name];
    values.push(value ?? null);
    if (values.length > HISTORY) values.shift();
  }

  showFacts({ engine: { status }, gateway_id }) {
    const { info } = status;
    const facts = info && [
      `${plural(info.num_stages, "stage")} × ${plural(info.tp_size, "rank")}`,
      info.dtype,
      `context ${count.format(info.max_model_len)}`,
    ];
    say("mesh-facts", facts ? facts.join(" · ") : "");
    say("chat-model", info ? info.model : "");
    say("gateway-id", `gateway ${gateway_id}`);
    say("epoch", status.epoch ? `epoch ${status.epoch}` : "");
    const hosts = new Set(status.workers.map((worker) => worker.address.replace(/:\d+$/, "")).filter(Boolean));
    byId("clock-note").hidden = hosts.size < 2;
  }

  showTiles(engine) {
    say("output-rate", rate(engine.output_tokens_per_s));
    say("prefill-rate", rate(engine.prefill_tokens_per_s));
    const steps = (this.timeline.lanes.values().next().value ?? []).slice(-50);
    const times = steps.map((step) => step.ended - step.started).sort((a, b) => a - b);
    say("step-time", times.length ? milliseconds(times[times.length >> 1]) : "–");
    say("step-rate", engine.steps_per_s === null ? "" : `${rate(engine.steps_per_s)} / s`);
    const { status } = engine;
    say("batch-size", status.num_steps ? count.format(status.last_batch_size) : "–");
    say("batch-tokens", status.num_steps ? `${status.last_batch_size === 1 ? "request" : "requests"} · ${plural(status.last_batch_tokens, "token")}` : "");
  }

  showCache(status) {
    const total = status.info?.num_slots ?? 0;
    const used = status.num_used_slots;
    const cached = status.num_cached_slots;
    const free = Math.max(0, total - used - cached);
    const share = (slots) => (total ? slots / total : 0);
    const bar = byId("kv-bar");
    bar.style.setProperty("--used-share", share(used));
    bar.style.setProperty("--cached-share", share(cached));
    bar.setAttribute("aria-label", `K/V slots: ${used} used, ${cached} cached, ${free} free of ${total}`);
    say("kv-total", total ? `${count.format(total)} tokens` : "");
    say("kv-used", total ? count.format(used) : "–");
    say("kv-cached", total ? count.format(cached) : "–");
    say("kv-free", total ? count.format(free) : "–");
    const asked = status.num_prompt_tokens;
    const found = asked ? Math.round((100 * status.num_cached_prompt_tokens) / asked) : 0;
    say("hit-rate", asked ? `prefix cache: ${found} % of ${short.format(asked)} prompt tokens` : "");
  }

  showQueue({ engine: { status }, num_gateway_requests }) {
    say("running", count.format(status.num_running));
    say("waiting", count.format(status.num_waiting));
    say("preempted", count.format(status.num_preempted));
    say("at-gateway", `${count.format(num_gateway_requests)} at this gateway`);
    const output = short.format(status.num_output_tokens);
    say("finished", `${count.format(status.num_finished)} finished, ${output} tokens in ${short.format(status.num_steps)} iterations`);
  }

  showWorkers({ workers }) {
    const list = byId("workers");
    while (list.children.length > workers.length) list.lastChild.remove();
    workers.forEach((worker, at) => {
      const row = list.children[at] ?? list.appendChild(workerRow());
      row.dataset.state = worker.state;
      const [, rank, state, address] = row.children;
      rank.textContent = `stage ${worker.stage} · rank ${worker.tp_rank}`;
      state.textContent = worker.detail ? `${worker.state}: ${worker.detail}` : worker.state;
      address.textContent = worker.address;
    });
  }

  drawLines() {
    drawLine(byId("output-line"), this.history.output);
    drawLine(byId("prefill-line"), this.history.prefill);
    drawLine(byId("queue-line"), this.history.queue);
    this.timeline.animate();
  }
}

function workerRow() {
  const row = element("li");
  row.append(element("i"), element("b"), element("span"), element("code"));
  return row;
}

function rate(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : count.format(Math.round(value));
}

function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function sentence(text) {
  const whole = text || "The engine is not ready";
  return whole[0].toUpperCase() + whole.slice(1) + (/[.!?]$/.test(whole) ? "" : ".");
}

function delay(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
