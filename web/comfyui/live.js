// The live panel of a node that decodes: figures, the accepted-token map, and one line per finished method.

import { cellSize, duration, figure, runColour, runEnds, share, topRun } from "./scale.js";

const MIN_HEIGHT = 340;
const LINE_HEIGHT = 19;
const MAX_LINES = 8;
const EARLY = 8;
const EMPTY = "rgba(128, 128, 128, 0.28)";

const TEXTS = {
  en: {
    idle: "The map of tokens accepted together fills here while the node draws.",
    perForward: "tokens / forward",
    speedup: "speed-up",
    acceptance: "accepted",
    together: "tokens accepted together",
    forwards: (count) => (count === 1 ? "1 forward" : `${count} forwards`),
    images: (count) => `${count} images`,
    exact: "exact",
    relaxed: "relaxed",
    stopped: "stopped",
  },
  zh: {
    idle: "生成时，这里会逐格显示哪些 token 被一起接受。",
    perForward: "token / 前向",
    speedup: "加速",
    acceptance: "接受率",
    together: "一起接受的 token 数",
    forwards: (count) => `${count} 次前向`,
    images: (count) => `${count} 张图`,
    exact: "精确",
    relaxed: "放宽",
    stopped: "已停止",
  },
};

const STYLE = `
.foredraft-live { box-sizing: border-box; display: flex; flex-direction: column; gap: 6px; padding: 8px; overflow: hidden;
  border-radius: 8px; background: var(--comfy-input-bg, #222); color: var(--input-text, #ddd); font: 12px/1.3 sans-serif; }
.foredraft-figures { display: flex; gap: 8px; }
.foredraft-figures > div { flex: 1; min-width: 0; }
.foredraft-figures b { display: block; font-size: 19px; line-height: 1.15; font-variant-numeric: tabular-nums; }
.foredraft-live small { color: var(--descrip-text, #999); font-size: 10px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; display: block; }
.foredraft-map { flex: 1; min-height: 0; position: relative; }
.foredraft-map canvas { position: absolute; inset: 0; width: 100%; height: 100%; object-fit: contain; }
.foredraft-map p { position: absolute; inset: 0; margin: 0; display: flex; align-items: center; justify-content: center;
  text-align: center; padding: 0 12px; color: var(--descrip-text, #999); }
.foredraft-scale { display: flex; gap: 6px; align-items: center; font-size: 10px; color: var(--descrip-text, #999); }
.foredraft-scale i { flex: 1; height: 6px; border-radius: 3px; min-width: 24px; }
.foredraft-line { display: flex; gap: 8px; align-items: baseline; font-size: 11px; line-height: ${LINE_HEIGHT}px;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.foredraft-line span { overflow: hidden; text-overflow: ellipsis; }
.foredraft-line .foredraft-name { flex: 1; min-width: 0; }
.foredraft-facts { color: var(--descrip-text, #999); }
.foredraft-text { margin: 0; min-height: 76px; white-space: pre-wrap; overflow: auto; user-select: text; }
.foredraft-badge { border-radius: 4px; padding: 0 5px; font-size: 10px; line-height: 15px; color: #fff; background: #00795a; }
.foredraft-badge.relaxed { background: #b35400; }
`;

function element(tag, className, parent) {
  const created = document.createElement(tag);
  if (className) created.className = className;
  parent?.append(created);
  return created;
}

function addStyle() {
  if (document.getElementById("foredraft-style")) return;
  const style = element("style", "", document.head);
  style.id = "foredraft-style";
  style.textContent = STYLE;
}

/** A box for the lines a node reports after it ran. */
export function textBox() {
  addStyle();
  return element("pre", "foredraft-live foredraft-text");
}

/** What a panel shows: the last event of every method drawn in this run, in order. */
export class Progress {
  constructor() {
    this.entries = [];
    this.stale = false;
    this.stopped = false;
  }

  /** Take an event's detail: it updates the last entry, adds the next method's, or begins a new run or another round of it. */
  take(detail) {
    const last = this.entries.at(-1);
    const same = last && !this.stale && !last.done && last.method === detail.method && detail.rounds >= last.rounds;
    const again = !same && this.entries.length > 1 && this.entries[0].method === detail.method;
    if (this.stale || again) this.entries = [];
    if (same) this.entries.pop();
    this.entries.push(detail);
    this.stale = this.stopped = false;
  }

  get current() {
    return this.entries.at(-1);
  }
}

/** Draw the map of one event into a canvas shown in `box`: cells fill in raster order, a bar marks the end of every run. */
export function paintMap(canvas, detail, box) {
  const { rows, cols, run } = detail;
  const cell = cellSize(rows, cols, box);
  const context = canvas.getContext("2d");
  canvas.width = cols * cell;
  canvas.height = rows * cell;
  context.fillStyle = EMPTY;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const top = topRun(run);
  run.slice(0, rows * cols).forEach((length, index) => {
    context.fillStyle = `rgb(${runColour(length, top).join(",")})`;
    context.fillRect((index % cols) * cell, Math.floor(index / cols) * cell, cell, cell);
  });
  if (cell < 6) return;
  context.fillStyle = "rgba(0, 0, 0, 0.3)";
  for (let y = 1; y < rows; y += 1) context.fillRect(0, y * cell, canvas.width, 1);
  const thick = Math.max(2, Math.floor(cell / 8));
  context.fillStyle = "rgba(0, 0, 0, 0.65)";
  for (const end of runEnds(run)) {
    if (end % cols === cols - 1) continue;
    context.fillRect(((end % cols) + 1) * cell - Math.floor(thick / 2), Math.floor(end / cols) * cell, thick, cell);
  }
}

/** The panel as a DOM element; `update` redraws at most once per animation frame. */
export class LivePanel {
  constructor(language) {
    addStyle();
    this.texts = TEXTS[language] ?? TEXTS.en;
    this.root = element("div", "foredraft-live");
    const figures = element("div", "foredraft-figures", this.root);
    this.figures = ["perForward", "speedup", "acceptance"].map((name) => {
      const box = element("div", "", figures);
      const value = element("b", "", box);
      const label = element("small", "", box);
      label.textContent = label.title = this.texts[name];
      return value;
    });
    const map = element("div", "foredraft-map", this.root);
    this.canvas = element("canvas", "", map);
    this.canvas.setAttribute("role", "img");
    this.idle = element("p", "", map);
    this.idle.textContent = this.texts.idle;
    const scale = element("div", "foredraft-scale", this.root);
    this.low = element("span", "", scale);
    this.low.textContent = "1";
    const ramp = element("i", "", scale);
    const stops = Array.from({ length: 9 }, (_, i) => `rgb(${runColour(1 + i, 9).join(",")})`);
    ramp.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
    this.high = element("span", "", scale);
    element("span", "", scale).textContent = this.texts.together;
    this.lines = element("div", "", this.root);
    this.progress = new Progress();
    this.frame = 0;
    this.map = map;
    new ResizeObserver(() => this.update(this.progress)).observe(map);
    this.draw();
  }

  /** The least height, in graph units, in which everything is readable. */
  get minHeight() {
    return MIN_HEIGHT + LINE_HEIGHT * Math.max(0, Math.min(this.progress.entries.length, MAX_LINES) - 2);
  }

  /** Show a progress record, now or at the next frame. */
  update(progress) {
    this.progress = progress;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const { current, entries } = this.progress;
    this.idle.style.display = current ? "none" : "";
    this.canvas.style.display = current ? "" : "none";
    this.root.style.minHeight = `${this.minHeight - 20}px`;
    // The first rounds also paid for the prompt: too early for an estimate.
    const known = typeof current?.speedup === "number" && (current.done || current.rounds >= EARLY);
    const speedup = known ? `${figure(current.speedup)}×` : "–";
    const values = [figure(current?.tokens_per_forward), speedup, share(current?.acceptance)];
    this.figures.forEach((value, i) => (value.textContent = values[i]));
    this.high.textContent = current ? String(topRun(current.run)) : "";
    const shown = entries.slice(-MAX_LINES);
    this.lines.replaceChildren(
      ...shown.flatMap((detail) => {
        const name = this.nameLine(detail);
        const facts = element("span", "foredraft-facts");
        facts.textContent = this.facts(detail, shown.length > 1).join(" · ");
        if (shown.length > 1) {
          name.insertBefore(facts, name.lastChild);
          return [name];
        }
        const second = element("div", "foredraft-line");
        second.append(facts);
        return [name, second];
      }),
    );
    if (!current) return;
    paintMap(this.canvas, current, { width: this.map.clientWidth, height: this.map.clientHeight });
    const spoken = `${figure(current.tokens_per_forward)} ${this.texts.perForward}`;
    this.canvas.setAttribute("aria-label", `${this.texts.together}: ${spoken}`);
  }

  /** The method and whether it is exact. */
  nameLine(detail) {
    const line = element("div", "foredraft-line");
    const name = element("span", "foredraft-name", line);
    name.textContent = name.title = detail.method;
    const badge = element("span", `foredraft-badge${detail.exact ? "" : " relaxed"}`, line);
    badge.textContent = detail.exact ? this.texts.exact : this.texts.relaxed;
    return line;
  }

  /** What to say about an entry; one of many is compared, the only one is described. */
  facts(detail, many) {
    if (many && detail.done) {
      const factor = typeof detail.speedup === "number" ? [`${figure(detail.speedup)}×`] : [];
      return [figure(detail.tokens_per_forward), duration(detail.seconds), ...factor];
    }
    const texts = this.texts;
    const facts = [`${detail.tokens} / ${detail.total} tokens`, texts.forwards(detail.forwards), duration(detail.seconds)];
    if (many) facts.splice(1, 1);
    else if (detail.images > 1) facts.push(texts.images(detail.images));
    return detail === this.progress.current && this.progress.stopped && !detail.done ? [...facts, texts.stopped] : facts;
  }
}
