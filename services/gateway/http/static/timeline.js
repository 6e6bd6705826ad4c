// Iterations as they pass through the stages: one lane for each stage, time to the right, and the size of the batches
// below. Knows canvases and steps, not where they come from. Times are milliseconds of the engine's clock.

const LONGEST_MS = 30_000;
const MOST_STEPS = 8192;
const WINDOWS_MS = [1000, 2000, 5000, 10_000, 30_000];
const COMFORTABLE_PX = 6; // of an iteration; the automatic window looks for that
const LANE = { height: 34, gap: 10, label: 18 };
const BATCH = { height: 36, label: 18 };
const AXIS = 20;
const FEWEST = 40; // values that a small line has room for, however few there are

export class Timeline {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.lanes = new Map(); // stage → steps, oldest first
    this.lag = 0;
    this.offset = null; // engine's clock minus performance.now(), where that is known
    this.windowMs = null; // null: as fits
    this.fittingMs = 5000;
    this.frozenAt = null; // the right edge while paused
    this.pointer = null;
    this.request = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
  }

  // Take the steps of a snapshot: [{stage, steps: [{id, received, started, ended, sequences, tokens, decode}]}].
  add(stages, takenMs, intervalMs) {
    const offset = takenMs - performance.now();
    // Another scheduler, on another host: its clock has nothing to do with the one before.
    if (this.offset !== null && Math.abs(offset - this.offset) > LONGEST_MS) this.clear([...this.lanes.keys()]);
    // The least delay tells the clock best; a slow drift lets a connection that has become slower count.
    this.offset = this.offset === null ? offset : Math.max(offset, this.offset - 2);
    this.lag = intervalMs + 120;
    for (const { stage, steps } of stages) {
      const lane = this.lanes.get(stage) ?? [];
      lane.push(...steps);
      const oldest = takenMs - LONGEST_MS - intervalMs;
      const old = lane.findIndex((step) => step.ended >= oldest);
      lane.splice(0, Math.max(old < 0 ? lane.length : old, lane.length - MOST_STEPS));
      this.lanes.set(stage, lane);
    }
    this.fit();
    this.animate();
  }

  // Another engine or another epoch: nothing of before compares.
  clear(stages) {
    this.lanes = new Map(stages.map((stage) => [stage, []]));
    this.offset = null;
    this.draw();
  }

  setWindow(seconds) {
    this.windowMs = seconds === null ? null : seconds * 1000;
    this.draw();
  }

  pause(paused) {
    this.frozenAt = paused ? this.rightEdge() : null;
    this.animate();
  }

  rightEdge() {
    return this.frozenAt ?? (this.offset === null ? 0 : performance.now() + this.offset - this.lag);
  }

  get span() {
    return this.windowMs ?? this.fittingMs;
  }

  // What there is to say of a lane without eyes: how busy it was in the window.
  busy(stage) {
    const right = this.rightEdge();
    const left = right - this.span;
    let sum = 0;
    for (const step of this.lanes.get(stage) ?? []) {
      sum += Math.max(0, Math.min(step.ended, right) - Math.max(step.started, left));
    }
    return Math.min(1, sum / this.span);
  }

  // Choose the shortest window in which an iteration is no hair.
  fit() {
    const lane = this.lanes.values().next().value ?? [];
    const latest = lane.slice(-64).map((step) => step.ended - step.started).sort((a, b) => a - b);
    if (!latest.length) return;
    const usual = latest[latest.length >> 1];
    const width = this.canvas.clientWidth || 600;
    const wanted = (usual / COMFORTABLE_PX) * width;
    const fitting = WINDOWS_MS.findLast((ms) => ms <= wanted) ?? WINDOWS_MS[0];
    // Stay where it is unless another one fits much better.
    if (wanted > this.fittingMs * 2 || wanted < this.fittingMs * 0.8) this.fittingMs = Math.min(fitting, 10_000);
  }

  animate() {
    if (this.request) return;
    if (this.still.matches || this.frozenAt !== null || !this.moves()) {
      this.draw();
      return;
    }
    this.request = requestAnimationFrame(() => {
      this.request = 0;
      this.draw();
      this.animate();
    });
  }

  // Whether anything would be seen to move.
  moves() {
    if (document.hidden || !this.canvas.clientWidth) return false;
    const left = this.rightEdge() - this.span - 1000;
    return [...this.lanes.values()].some((lane) => lane.length && lane[lane.length - 1].ended > left);
  }

  point(event) {
    this.pointer = event && { x: event.offsetX, y: event.offsetY };
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const numLanes = Math.max(1, this.lanes.size);
    const height = numLanes * (LANE.label + LANE.height + LANE.gap) + BATCH.label + BATCH.height + AXIS;
    const context = fitted(this.canvas, width, height);
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const right = this.rightEdge();
    const scale = width / this.span;
    const x = (ms) => (ms - right) * scale + width;
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "alphabetic";
    let y = 0;
    let pointed = null;
    for (const [stage, steps] of this.lanes.size ? this.lanes : [[0, []]]) {
      context.fillStyle = colour("--muted");
      context.textAlign = "left";
      context.fillText(`stage ${stage}`, 0, y + 11);
      context.textAlign = "right";
      context.fillText(`${Math.round(100 * this.busy(stage))} % busy`, width, y + 11);
      y += LANE.label;
      context.fillStyle = colour("--lane");
      context.beginPath();
      context.roundRect(0, y, width, LANE.height, 5);
      context.fill();
      context.save();
      context.clip();
      const found = drawSteps(context, steps, x, y, LANE.height, colour, this.pointer);
      context.restore();
      pointed ??= found && { ...found, stage };
      y += LANE.height + LANE.gap;
    }
    const first = this.lanes.values().next().value ?? [];
    drawBatches(context, first, x, y, width, colour);
    y += BATCH.label + BATCH.height;
    drawAxis(context, this.span, width, y, colour, this.frozenAt !== null);
    this.show(pointed, x, width);
  }

  show(pointed, x, width) {
    this.tip.hidden = pointed === null;
    if (!pointed) return;
    const { step, stage, bottom } = pointed;
    const prefill = step.tokens - step.decode;
    const waited = step.started - step.received;
    this.tip.textContent = [
      `step ${step.id} · stage ${stage} · ${milliseconds(step.ended - step.started)}`,
      `${step.sequences} requests: ${step.decode} decode + ${prefill} prefill tokens`,
      `control message ${milliseconds(Math.max(0, waited))} earlier`,
    ].join("\n");
    const middle = (x(step.started) + x(step.ended)) / 2;
    const half = this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.max(half, Math.min(width - half, middle))}px`;
    this.tip.style.top = `${bottom + 6}px`;
  }
}

function drawSteps(context, steps, x, y, height, colour, pointer) {
  const [decode, prefill, edge] = [colour("--decode"), colour("--prefill"), colour("--lane")];
  const inLane = pointer && pointer.y >= y && pointer.y <= y + height;
  let found = null;
  for (let at = steps.length - 1; at >= 0; at -= 1) {
    const step = steps[at];
    const left = x(step.started);
    const right = x(step.ended);
    if (right < 0) break;
    if (left > context.canvas.clientWidth) continue;
    const gap = right - left > 5 ? 1 : 0;
    const width = Math.max(0.6, right - left - gap);
    const share = step.tokens ? step.decode / step.tokens : 1;
    // Whatever is there is seen, however small its part.
    let decodeHeight = share * height;
    if (share > 0 && share < 1) decodeHeight = Math.max(4, Math.min(height - 4, decodeHeight));
    context.fillStyle = prefill;
    if (share < 1) context.fillRect(left, y, width, height - decodeHeight);
    context.fillStyle = decode;
    if (share > 0) context.fillRect(left, y + height - decodeHeight, width, decodeHeight);
    if (inLane && !found && pointer.x >= left - 1 && pointer.x <= Math.max(right, left + 2)) {
      found = { step, bottom: y + height };
      context.strokeStyle = edge;
      context.lineWidth = 2;
      context.strokeRect(left + 1, y + 1, Math.max(1, width - 2), height - 2);
    }
  }
  return found;
}

function drawBatches(context, steps, x, y, width, colour) {
  const most = steps.reduce((max, step) => (x(step.ended) > 0 ? Math.max(max, step.sequences) : max), 1);
  context.fillStyle = colour("--muted");
  context.textAlign = "left";
  context.fillText("requests in a batch", 0, y + 11);
  context.textAlign = "right";
  context.fillText(`up to ${most}`, width, y + 11);
  const bottom = y + BATCH.label + BATCH.height;
  const columns = new Path2D(); // filled at once, so that neighbours have no seam
  for (let at = steps.length - 1; at >= 0; at -= 1) {
    const step = steps[at];
    const left = x(step.started);
    const next = steps[at + 1];
    // As long as the next one follows at once, the columns touch.
    const pause = next ? next.started - step.ended : 0;
    const right = next && pause < 5 + (step.ended - step.started) / 2 ? x(next.started) : x(step.ended);
    if (right < 0) break;
    const height = (step.sequences / most) * BATCH.height;
    columns.rect(left, bottom - height, Math.max(0.6, right - left), height);
  }
  context.fillStyle = colour("--batch");
  context.fill(columns);
  context.fillStyle = colour("--line");
  context.fillRect(0, bottom, width, 1);
}

function drawAxis(context, spanMs, width, y, colour, frozen) {
  context.fillStyle = colour("--muted");
  const ticks = 4;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const ago = (spanMs / ticks) * tick;
    context.textAlign = tick === 0 ? "right" : tick === ticks ? "left" : "center";
    const said = tick === 0 ? (frozen ? "paused" : "now") : `−${Number((ago / 1000).toFixed(2))} s`;
    context.fillText(said, width - (width / ticks) * tick, y + 15);
  }
}

// A line that shows how a number went; `values` may have gaps (null).
export function drawLine(canvas, values) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return;
  const context = fitted(canvas, width, height);
  const style = getComputedStyle(canvas);
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  const numShown = Math.max(FEWEST, values.length);
  const x = (at) => width - ((values.length - 1 - at) / (numShown - 1)) * width;
  const y = (value) => height - 1 - (value / most) * (height - 3);
  const path = new Path2D();
  let begun = false;
  let first = 0;
  values.forEach((value, at) => {
    if (value === null) return;
    if (!begun) [begun, first] = [true, x(at)];
    if (x(at) === first) path.moveTo(x(at), y(value));
    else path.lineTo(x(at), y(value));
  });
  if (!begun) return;
  const area = new Path2D(path);
  area.lineTo(x(values.length - 1), height);
  area.lineTo(first, height);
  context.fillStyle = style.getPropertyValue("--line-fill").trim();
  context.fill(area);
  context.strokeStyle = style.getPropertyValue("--line-stroke").trim();
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke(path);
}

// Size a canvas in CSS pixels, sharp on every screen, and return its cleared context.
function fitted(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function milliseconds(ms) {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
