// The accepted-token map's colours, figures and geometry. Pure functions: the tests run them in Node.

// The same anchors as decoding/heatmap.py, evenly spaced from dark to light.
export const ANCHORS = [
  [68, 1, 84],
  [71, 45, 123],
  [59, 82, 139],
  [44, 114, 142],
  [33, 145, 140],
  [40, 174, 128],
  [94, 201, 98],
  [173, 220, 48],
  [253, 231, 37],
];

/** A number in 0..1 -> [r, g, b] in 0..255, interpolated between the anchors. */
export function colour(value) {
  const place = Math.min(Math.max(value, 0), 1) * (ANCHORS.length - 1);
  const low = Math.min(Math.floor(place), ANCHORS.length - 2);
  const weight = place - low;
  return ANCHORS[low].map((channel, i) => Math.round(channel * (1 - weight) + ANCHORS[low + 1][i] * weight));
}

/** The colour of a token committed in a run of `run`, where `top` is the longest run. */
export function runColour(run, top) {
  return colour((run - 1) / (top - 1));
}

/** The run at the light end of the scale: the longest one, at least 2. */
export function topRun(runs) {
  return runs.reduce((top, run) => Math.max(top, run), 2);
}

/** Indices of tokens that end their run: equal runs of r follow each other in blocks of r, in raster order. */
export function runEnds(runs) {
  const ends = [];
  let start = 0;
  while (start < runs.length) {
    const run = Math.max(1, runs[start]);
    let end = start;
    while (end + 1 < runs.length && end + 1 < start + run && runs[end + 1] === runs[start]) end += 1;
    ends.push(end);
    start = end + 1;
  }
  return ends;
}

/** Pixels per token in a box of CSS pixels: two for one, because graphs are zoomed and screens are dense. */
export function cellSize(rows, cols, box) {
  const fit = Math.min(box.width / Math.max(cols, 1), box.height / Math.max(rows, 1));
  return Math.min(Math.max(Math.floor(2 * fit), 1), 64);
}

/** 3.614 -> "3.61", 12.34 -> "12.3", 250 -> "250"; nothing to say -> a dash. */
export function figure(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** 0.634 -> "63 %". */
export function share(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${Math.round(value * 100)} %` : "–";
}

/** Seconds for people: "0.84 s", "12.3 s", "2:05 min". */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${figure(seconds)} s`;
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
}
