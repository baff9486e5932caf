// Building blocks: numbers in words, and tables whose rows stay the same elements while their contents change.
// Everything that comes from outside becomes a text node; nothing here makes markup out of a string.

export const byId = (id) => document.getElementById(id);

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Sets what changed only: a selection, and the screen reader's place, survive.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Text that a client has chosen: kept apart, so that it cannot turn the direction of what is around it.
export const foreign = (text) => element("bdi", "", text);

/* A table of `columns`: {label, area, text(item)} or {label, area, fill(cell, item)}; `head: true` names the row.
   `key` tells items apart. Rows are made once for each key and then only filled. */
export class Table {
  constructor(table, columns, key, empty) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = element("tbody");
    this.empty = element("tr", "empty", element("td", "", empty));
    this.empty.firstChild.colSpan = columns.length;
    const heads = columns.map((column) => {
      const head = element("th", column.area, column.label);
      head.scope = "col";
      return head;
    });
    table.append(element("thead", "", element("tr", "", ...heads)), this.body);
  }

  show(items) {
    const shown = new Map(items.map((item) => [this.key(item), item]));
    for (const [key, row] of this.rows) {
      if (!shown.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    let place = this.body.firstElementChild;
    for (const [key, item] of shown) {
      const row = this.rows.get(key) ?? this.made(key);
      if (row === place) place = row.nextElementSibling;
      else this.body.insertBefore(row, place);
      this.columns.forEach((column, index) => fill(column, row.children[index], item));
    }
    if (shown.size) this.empty.remove();
    else this.body.append(this.empty);
  }

  made(key) {
    const cells = this.columns.map((column) => {
      const cell = element(column.head ? "th" : "td", column.area);
      if (column.head) cell.scope = "row";
      else cell.dataset.label = column.label;
      return cell;
    });
    const row = element("tr", "", ...cells);
    this.rows.set(key, row);
    return row;
  }
}

function fill(column, cell, item) {
  if (column.fill) column.fill(cell, item);
  else setText(cell, column.text(item));
}

// A bar of parts, [[name, amount], ...], whose words are read out instead.
export function fillBar(bar, parts, words) {
  bar.role = "img";
  bar.ariaLabel = words;
  while (bar.children.length < parts.length) bar.append(element("span"));
  parts.forEach(([name, amount], index) => {
    const part = bar.children[index];
    part.className = name;
    part.style.flexGrow = amount;
  });
}

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(number);

const SIZES = ["B", "kB", "MB", "GB", "TB"];
export function bytes(number) {
  let unit = 0;
  while (number >= 999.5 && unit < SIZES.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit && number < 99.95 ? number.toFixed(number < 9.995 ? 2 : 1) : Math.round(number)} ${SIZES[unit]}`;
}

export const rate = (bytesPerS) => (bytesPerS === null ? "" : `${bytes(bytesPerS)}/s`);

export const ms = (number) => (number < 99.95 ? number.toFixed(1) : count(Math.round(number)));

export function duration(milliseconds) {
  if (milliseconds < 999.5) return `${ms(Math.max(milliseconds, 0))} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 5970) return `${Math.round(seconds / 60)} min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${Math.round(hours)} h` : `${Math.round(hours / 24)} d`;
}

export const words = (name) => name.toLowerCase().replaceAll("_", " ");

export const clock = (milliseconds) => new Date(milliseconds).toLocaleTimeString("en-GB");
