// Numbers and times as people read them.

export const NONE = "–";
const known = (value) => value !== null && value !== undefined;

export const percent = (value, digits = 2) => (known(value) ? `${(100 * value).toFixed(digits)} %` : NONE);
export const number = (value, digits = 4) => (known(value) ? value.toFixed(digits) : NONE);

export function bytes(count) {
  if (!known(count)) return NONE;
  if (count < 1000) return `${Math.round(count)} B`;
  for (const unit of ["kB", "MB", "GB"]) {
    count /= 1000;
    if (count < 999.95) return `${count.toFixed(1)} ${unit}`;
  }
  return `${(count / 1000).toFixed(1)} TB`;
}

export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

export function ago(then, now) {
  if (!known(then)) return NONE;
  const seconds = Math.max(0, now - then);
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export const moment = (then) => (known(then) ? new Date(1000 * then).toLocaleString() : "");
export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
export const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
