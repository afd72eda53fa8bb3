// Small pieces several views have.

import { h, mark, s, say } from "./dom.js";
import { duration } from "./format.js";

const SIGNS = { running: "●", finished: "✓", stopped: "■", damaged: "✕" };
const REASONS = {
  lock: "its writer holds the lock of the run",
  growth: "rounds keep appearing, though no writer can be seen on this machine",
  age: "it changed a short while ago; this system does not tell who holds locks",
  rounds: "it has all that belongs to it",
  file: "its file cannot be read",
};

/** A word for the state of a run, with a sign and a colour of its own. */
export function badge() {
  const sign = h("span", { class: "sign", "aria-hidden": "true" });
  const word = h("span", {});
  const node = h("span", { class: "badge" }, sign, word);
  return {
    node,
    update(entry) {
      say(sign, SIGNS[entry.status]);
      say(word, entry.status);
      mark(node, "data-status", entry.status);
      mark(node, "title", entry.status === "stopped" ? "no writer holds the lock, and rounds or the final test are missing" : REASONS[entry.by]);
    },
  };
}

/** How far a run is. */
export function progress() {
  const bar = h("progress", { max: 1, value: 0 });
  const text = h("span", {});
  const node = h("span", { class: "progress" }, bar, text);
  return {
    node,
    update(entry) {
      const of = entry.of ?? 0;
      mark(bar, "max", Math.max(1, of));
      mark(bar, "value", Math.min(entry.rounds, of));
      mark(bar, "aria-label", `${entry.rounds} of ${of} rounds`);
      say(text, entry.of === null ? "–" : `${entry.rounds} / ${of}`);
      mark(bar, "title", entry.left ? `about ${duration(entry.left)} left` : null);
    },
  };
}

/** Horizontal bars: `[label, share of the width, text, tone]`. */
export function bars(rows) {
  return h(
    "div",
    { class: "bars", role: "list" },
    rows.map(([label, share, text]) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;
      return h(
        "div",
        { class: "bar-row", role: "listitem" },
        h("span", { class: "bar-label", title: label }, label),
        h("span", { class: "track", "aria-hidden": "true" }, bar),
        h("span", { class: "bar-text" }, text),
      );
    }),
  );
}

export function section(title, ...content) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...content);
}

export const PALETTE = 7;
export const colour = (place) => `c${place % PALETTE}`;
/** Changes with every colour, and moves on when the colours begin again. */
export const shape = (place) => (place + Math.floor(place / PALETTE)) % 7;
/** Curves that lie upon each other are told apart by their gaps. */
export const dash = (place) => ["", "8 4", "2 3", "9 3 2 3"][place % 4];

/** A marker around a point. */
export function marker(kind, x, y, size = 4) {
  const paths = [
    null,
    `M${-size} ${-size}H${size}V${size}H${-size}Z`,
    `M0 ${-size * 1.2}L${size * 1.15} ${size}H${-size * 1.15}Z`,
    `M0 ${-size * 1.3}L${size * 1.3} 0L0 ${size * 1.3}L${-size * 1.3} 0Z`,
    `M0 ${size * 1.2}L${size * 1.15} ${-size}H${-size * 1.15}Z`,
    `M${-size} -1.5H-1.5V${-size}H1.5V-1.5H${size}V1.5H1.5V${size}H-1.5V1.5H${-size}Z`,
    `M${-size} ${-size}L${size} ${size}M${size} ${-size}L${-size} ${size}`,
  ];
  const at = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  if (kind === 0) return s("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: size, class: "marker" });
  return s("path", { d: paths[kind], transform: at, class: kind === 6 ? "marker crossed" : "marker" });
}

/** The line and marker of a curve, for a legend or a table. */
export function swatch(place, dashed = dash(place)) {
  return s(
    "svg",
    { class: `swatch ${colour(place)}`, viewBox: "0 0 30 14", width: 30, height: 14, "aria-hidden": "true" },
    s("line", { x1: 1, x2: 29, y1: 7, y2: 7, class: "curve", "stroke-dasharray": dashed || null }),
    marker(shape(place), 15, 7),
  );
}
