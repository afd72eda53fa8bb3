// Which runs are ticked. Kept while the tab lives, also over a reload.

const KEY = "fedprompt-selection";

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY) ?? "[]").filter((id) => /^[0-9a-f]{16}$/.test(id));
  } catch {
    return [];
  }
}

const chosen = new Set(stored());

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify([...chosen]));
  } catch {
    // a browser that stores nothing
  }
}

export const selection = {
  has: (id) => chosen.has(id),
  ids: () => [...chosen],
  set(id, on) {
    if (on) chosen.add(id);
    else chosen.delete(id);
    keep();
  },
  clear() {
    chosen.clear();
    keep();
  },
};
