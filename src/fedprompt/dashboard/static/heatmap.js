// Clients by rounds, in the colours of cividis, which everybody sees alike. Arrow keys move from cell to cell.

import { h, mark, s, say } from "./dom.js";
import { cut, percent } from "./format.js";

const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"].map(
  (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)),
);
const EDGE = { right: 8, top: 4, bottom: 38 };

export function cividis(share) {
  const at = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const mixed = CIVIDIS[low].map((value, place) => Math.round(value + (at - low) * (CIVIDIS[low + 1][place] - value)));
  return `rgb(${mixed.join(" ")})`;
}

export function heatmap(title) {
  const holder = h("div", { class: "plot", tabindex: 0, role: "img" });
  const readout = h("output", { class: "readout" });
  const scaleBar = h("p", { class: "scale" });
  const caption = h("figcaption", {}, title);
  const node = h("figure", { class: "chart" }, caption, scaleBar, holder, readout);
  let data = { clients: [], rounds: [], accuracy: [] };
  let cursor = null; // [row, column]
  let geometry = null;
  let frame = null;

  function read() {
    const { clients, rounds, accuracy } = data;
    if (!clients.length) return say(readout, "No client was evaluated yet.");
    const [row, column] = cursor ?? [0, rounds.length - 1];
    const value = accuracy[row][column];
    say(readout, `${clients[row]}, round ${rounds[column]}: ${value === null || value === undefined ? "not evaluated" : percent(value)}`);
    mark(holder, "aria-label", `${caption.textContent}. ${readout.textContent}`);
  }

  function draw() {
    const { clients, rounds, accuracy } = data;
    const known = accuracy.flat().filter((value) => value !== null && value !== undefined);
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const width = Math.max(240, Math.floor(holder.clientWidth || 480));
    const left = Math.min(width * 0.3, 14 + 6.6 * Math.max(6, ...clients.map((name) => Math.min(16, name.length))));
    const tall = Math.max(7, Math.min(24, 320 / Math.max(1, clients.length)));
    const wide = (width - left - EDGE.right) / Math.max(1, rounds.length);
    const height = EDGE.top + tall * clients.length + EDGE.bottom;
    geometry = { left, tall, wide, width };
    const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
    accuracy.forEach((line, row) =>
      line.forEach((value, column) => {
        const missing = value === null || value === undefined;
        picture.append(
          s("rect", {
            x: (left + column * wide).toFixed(2),
            y: (EDGE.top + row * tall).toFixed(2),
            width: Math.max(0.5, wide - (wide > 6 ? 1 : 0)).toFixed(2),
            height: (tall - (tall > 9 ? 1 : 0)).toFixed(2),
            fill: missing ? null : cividis(share(value)),
            class: missing ? "absent" : null,
          }),
        );
      }),
    );
    const everyName = Math.ceil(13 / tall);
    clients.forEach((name, row) => {
      if (row % everyName === 0)
        picture.append(s("text", { x: left - 6, y: EDGE.top + (row + 0.5) * tall + 4, class: "tick end" }, cut(name, Math.max(4, Math.floor((left - 14) / 6.4)))));
    });
    const everyRound = Math.max(1, Math.ceil((rounds.length * 42) / (width - left)));
    rounds.forEach((round, column) => {
      if (column % everyRound === 0)
        picture.append(s("text", { x: left + (column + 0.5) * wide, y: height - EDGE.bottom + 16, class: "tick middle" }, String(round)));
    });
    picture.append(s("text", { x: left + (width - left) / 2, y: height - 5, class: "tick middle" }, "Round"));
    frame = s("rect", { class: "cell-frame", "pointer-events": "none" });
    picture.append(frame);
    place();
    holder.replaceChildren(picture);
    const steps = Array.from({ length: 12 }, (_, step) => s("rect", { x: step * 10, y: 0, width: 10.5, height: 10, fill: cividis(step / 11) }));
    scaleBar.replaceChildren(
      ...(known.length ? [percent(low, 0), s("svg", { viewBox: "0 0 120 10", width: 120, height: 10, "aria-hidden": "true" }, ...steps), percent(high, 0)] : []),
    );
    read();
  }

  function place() {
    mark(frame, "visibility", cursor ? "visible" : "hidden");
    if (!cursor) return;
    const { left, tall, wide } = geometry;
    for (const [name, value] of Object.entries({ x: left + cursor[1] * wide - 1, y: EDGE.top + cursor[0] * tall - 1, width: wide + 1, height: tall + 1 }))
      frame.setAttribute(name, value.toFixed(2));
  }

  function move(to) {
    cursor = to;
    if (frame) place();
    read();
  }

  holder.addEventListener("pointermove", (event) => {
    if (!geometry || !data.clients.length) return;
    const box = holder.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - geometry.left) / geometry.wide);
    const row = Math.floor((event.clientY - box.top - EDGE.top) / geometry.tall);
    if (row >= 0 && row < data.clients.length && column >= 0 && column < data.rounds.length) move([row, column]);
  });
  holder.addEventListener("pointerleave", () => move(null));
  holder.addEventListener("focus", () => mark(readout, "aria-live", "polite"));
  holder.addEventListener("blur", () => (mark(readout, "aria-live", "off"), move(null)));
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") move(null);
    if (!step || !data.clients.length) return;
    event.preventDefault();
    const [row, column] = cursor ?? [0, data.rounds.length - 1];
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    move(cursor ? [within(row + step[0], data.clients.length), within(column + step[1], data.rounds.length)] : [row, column]);
  });
  const sizes = new ResizeObserver(() => holder.clientWidth && Math.floor(holder.clientWidth) !== geometry?.width && draw());
  sizes.observe(holder);

  return {
    node,
    update(wanted) {
      data = wanted;
      if (cursor && (cursor[0] >= data.clients.length || cursor[1] >= data.rounds.length)) cursor = null;
      draw();
    },
    about: (more) => say(caption, [title, more].filter(Boolean).join(", ")),
    close: () => sizes.disconnect(),
  };
}
