// Curves, drawn as SVG in the width there is. A line through them follows the pointer or the arrow keys.

import { h, mark, s, say } from "./dom.js";
import { colour, dash, marker, shape, swatch } from "./parts.js";

const HEIGHT = 250;
const EDGE = { left: 54, right: 14, top: 10, bottom: 40 };
const MARKERS = 30; // points of a curve up to which each has its marker

/** Round numbers that cover a range, some five of them. */
export function ticks(low, high, whole = false, most = 6) {
  if (!(high > low)) high = low + 1;
  const rough = (high - low) / (most - 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return found;
}

function powers(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 6 ? inside.filter((value) => /^1/.test(value.toExponential())) : inside;
}

/** The axis of some values: from what to what, where ticks are, and a value's place between 0 and 1. */
function axis(values, { log = false, whole = false, bounds = null, padded = false }) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (log) {
    low = Math.max(low, 1);
    if (high <= low) [low, high] = [low / 2, low * 2];
    const wide = Math.log(high / low);
    return { ticks: powers(low, high), place: (value) => Math.log(Math.max(value, low) / low) / wide };
  }
  if (high === low) [low, high] = whole ? [low, low + 1] : [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05];
  else if (padded) [low, high] = [low - (high - low) * 0.06, high + (high - low) * 0.06];
  if (bounds) [low, high] = [Math.max(low, bounds[0]), Math.min(high, bounds[1])];
  return { ticks: ticks(low, high, whole, whole ? 6 : 8), place: (value) => (value - low) / (high - low) };
}

/**
 * A chart of curves. `update` takes `[{label, points: [[x, y], ...], band: [[x, low, high], ...], place, dashed}]`.
 * Options: title, x and y (names of the axes), readX, readY (numbers as text), log (the x axis), bounds (of y).
 */
export function curves(options) {
  const legend = h("ul", { class: "legend" });
  const readout = h("output", { class: "readout" });
  const holder = h("div", { class: "plot", tabindex: 0, role: "img" });
  const caption = h("figcaption", {}, options.title);
  const node = h("figure", { class: "chart" }, caption, legend, holder, readout);
  let series = [];
  let cursor = null; // x of the line that follows; null for the latest
  let scale = null;

  const xs = () => [...new Set(series.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);

  function read() {
    const known = xs();
    if (!known.length) return say(readout, "Nothing was measured yet.");
    const x = cursor === null ? known[known.length - 1] : cursor;
    const values = series.map((each) => [each.label, nearest(each.points, x, options.log)]).filter(([, point]) => point);
    const where = (point) => (options.log ? ` (${options.readX(point[0])})` : point[0] === x ? "" : ` (in ${options.readX(point[0])})`);
    const parts = values.map(([label, point]) => `${label} ${options.readY(point[1])}${where(point)}`);
    const shownX = options.log ? "" : `${options.x} ${options.readX(x)}: `;
    const more = parts.length > 8 ? `, and ${parts.length - 8} more` : "";
    say(readout, shownX + parts.slice(0, 8).join(", ") + more);
    mark(holder, "aria-label", `${caption.textContent}. ${readout.textContent}`);
  }

  function draw() {
    const width = Math.max(240, Math.floor(holder.clientWidth || 480));
    const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
    const all = series.flatMap(({ points, band }) => [...points.map(([, y]) => y), ...(band ?? []).flatMap(([, low, high]) => [low, high])]);
    const horizontal = axis(xs(), { log: options.log, whole: !options.log });
    const vertical = axis(all, { bounds: options.bounds, padded: true });
    const x = (value) => EDGE.left + inner.width * horizontal.place(value);
    const y = (value) => EDGE.top + inner.height * (1 - vertical.place(value));
    scale = { x, width };
    const floor = EDGE.top + inner.height;
    const room = Math.max(2, Math.floor(inner.width / 55));
    const few = horizontal.ticks.filter((_, place, known) => place % Math.ceil(known.length / room) === 0);
    const picture = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
    for (const value of vertical.ticks)
      picture.append(
        s("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value), class: "gridline" }),
        s("text", { x: EDGE.left - 7, y: y(value) + 4, class: "tick end" }, options.tickY(value)),
      );
    for (const value of few)
      picture.append(
        s("line", { x1: x(value), x2: x(value), y1: floor, y2: floor + 4, class: "axis" }),
        s("text", { x: x(value), y: floor + 17, class: "tick middle" }, options.readX(value)),
      );
    picture.append(
      s("line", { x1: EDGE.left, x2: width - EDGE.right, y1: floor, y2: floor, class: "axis" }),
      s("text", { x: EDGE.left + inner.width / 2, y: HEIGHT - 5, class: "tick middle" }, options.xTitle ?? options.x),
    );
    for (const each of series) picture.append(curve(each, x, y));
    if (cursor !== null) picture.append(s("line", { x1: x(cursor), x2: x(cursor), y1: EDGE.top, y2: floor, class: "cursor" }));
    holder.replaceChildren(picture);
    read();
  }

  function move(to) {
    cursor = to;
    draw();
  }

  holder.addEventListener("pointermove", (event) => {
    const known = xs();
    if (!scale || !known.length) return;
    const at = ((event.clientX - holder.getBoundingClientRect().left) * scale.width) / holder.clientWidth;
    const closest = known.reduce((best, x) => (Math.abs(scale.x(x) - at) < Math.abs(scale.x(best) - at) ? x : best));
    if (closest !== cursor) move(closest);
  });
  holder.addEventListener("pointerleave", () => move(null));
  holder.addEventListener("focus", () => mark(readout, "aria-live", "polite"));
  holder.addEventListener("blur", () => (mark(readout, "aria-live", "off"), move(null)));
  holder.addEventListener("keydown", (event) => {
    const known = xs();
    const at = cursor === null ? known.length - 1 : known.indexOf(cursor);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: known.length - 1 }[event.key];
    if (event.key === "Escape") move(null);
    if (to === undefined || !known.length) return;
    event.preventDefault();
    move(known[Math.max(0, Math.min(known.length - 1, to))]);
  });
  const sizes = new ResizeObserver(() => holder.clientWidth && Math.floor(holder.clientWidth) !== scale?.width && draw());
  sizes.observe(holder);

  return {
    node,
    update(wanted) {
      series = wanted.map((each) => ({ ...each, points: each.points.filter(([x, y]) => x !== null && y !== null) }));
      if (cursor !== null && !xs().includes(cursor)) cursor = null;
      legend.replaceChildren(
        ...(series.length > 1 ? series : []).map((each) => h("li", {}, swatch(each.place, each.dashed ?? dash(each.place)), each.label)),
      );
      draw();
    },
    about: (more) => say(caption, [options.title, more].filter(Boolean).join(", ")),
    close: () => sizes.disconnect(),
  };
}

function curve({ points, band, place, dashed = dash(place) }, x, y) {
  const group = s("g", { class: colour(place) });
  if (band?.length > 1) {
    const upper = band.map(([at, , high]) => `${x(at).toFixed(1)} ${y(high).toFixed(1)}`);
    const lower = band.map(([at, low]) => `${x(at).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
    group.append(s("path", { d: `M${[...upper, ...lower].join("L")}Z`, class: "band" }));
  }
  const line = points.map(([at, value]) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`);
  if (line.length > 1) group.append(s("path", { d: `M${line.join("L")}`, class: "curve", "stroke-dasharray": dashed || null }));
  const every = Math.max(1, Math.ceil(points.length / MARKERS));
  points.forEach(([at, value], number) => {
    if (number === points.length - 1 || (points.length <= MARKERS ? true : number % (4 * every) === 0))
      group.append(marker(shape(place), x(at), y(value), number === points.length - 1 ? 4 : 3));
  });
  return group;
}

function nearest(points, x, log) {
  if (!points.length) return null;
  if (!log) return points.findLast(([at]) => at <= x) ?? null; // of a curve that ended before, its end
  return points.reduce((best, point) => (Math.abs(point[0] - x) <= Math.abs(best[0] - x) ? point : best)); // of equals the last
}
