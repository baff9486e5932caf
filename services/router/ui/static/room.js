// One room: a dialog with its waterfall, opened by the address's #room=NUMBER, drawn anew while the room lives.

import { byId, bytes, duration, element, foreign, ms, setText, Table, words } from "./view.js";

// What a span is about, by which it is coloured; a leg as a whole is none of these.
const KINDS = {
  "pd.first_token_wait": "waiting", "pd.bootstrap_wait": "waiting", "pd.compute_wait": "waiting",
  "pd.prealloc_wait": "waiting", "pd.transfer_wait": "waiting", "pd.peering": "waiting", "pd.quarantine": "waiting",
  "pd.abort": "waiting", "pd.receive": "computing",
  "pd.chunk_compute": "computing", "pd.prompt_compute": "computing", "pd.first_token": "computing",
  "pd.decode_steps": "computing", "pd.dispatch": "computing", "pd.stream": "computing",
  "pd.allocate": "moving", "pd.chunk_transfer": "moving", "pd.commit": "moving", "pd.gate": "moving",
  "pd.restore": "moving", "pd.refetch": "moving",
};
const CRUMB = 0.005; // of the time to first token
const MARGIN = 1.04; // what is shown beyond the end of the scale

const named = (span) => span.replace("pd.", "").replaceAll("_", " ");

export class RoomDialog {
  constructor(ask) {
    this.ask = ask;
    this.dialog = byId("room");
    this.number = null;
    this.view = null;
    this.spans = new Table(byId("spans"), this.columnsOfSpans(), (row) => row.key, "Nothing is noted of its times.");
    this.states = new Table(byId("states"), [
      { label: "side", area: "side", head: true, text: (step) => step.side },
      { label: "state", area: "step", fill: fillState },
      { label: "at ms", area: "at number", text: (step) => ms(step.at) },
    ], (step) => `${step.side} ${step.state}`, "Its record is forgotten already.");
    byId("room-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.left());
    byId("scale").addEventListener("change", () => this.view && this.show());
    window.addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  // Opens the room that the address names, or closes.
  follow() {
    const number = /^#room=(\d{1,20})$/.exec(location.hash)?.[1] ?? null;
    if (number === this.number) return;
    this.number = number;
    this.view = null;
    if (number === null) {
      this.dialog.close();
      return;
    }
    setText(byId("room-title"), `Room ${number}`);
    byId("room-content").hidden = true;
    byId("room-trouble").hidden = true;
    if (!this.dialog.open) this.dialog.showModal();
    this.refresh();
  }

  left() {
    this.number = null;
    if (location.hash) history.pushState(null, "", location.pathname);
  }

  // Asks again, unless the room is over.
  async refresh() {
    const number = this.number;
    if (number === null || (this.view && isOver(this.view))) return;
    let view = null;
    let trouble = "";
    try {
      view = await this.ask(`api/rooms/${number}`);
    } catch (error) {
      trouble = error.message;
    }
    if (number !== this.number) return;
    setText(byId("room-trouble"), trouble);
    byId("room-trouble").hidden = !trouble;
    if (!view) return;
    this.view = view;
    this.show();
  }

  show() {
    const spans = this.view.sides.flatMap((side) => side.legs.flatMap((leg) => [leg.root, ...leg.stages]));
    const steps = this.view.sides.flatMap((side) => side.transfer?.timeline ?? []);
    this.begin = Math.min(...spans.map((span) => span.start_ms), ...steps.map((step) => step.at_ms));
    const ends = [...spans.map((span) => span.end_ms ?? this.view.now_ms), ...steps.map((step) => step.at_ms)];
    const whole = Math.max(...ends) - this.begin;
    this.firstToken = firstTokenOf(this.view, this.begin);
    byId("scale").hidden = this.firstToken === null;
    const isWhole = this.firstToken === null || byId("scale").querySelector("[value=whole]").checked;
    this.scale = Math.max(isWhole ? whole : Math.min(this.firstToken * MARGIN, whole), 0.001);
    this.showFacts(whole);
    showAccount(this.view.account);
    this.spans.show(this.view.sides.flatMap((side, place) => this.rowsOf(side, place)));
    this.states.show(this.view.sides.flatMap((side) => this.stepsOf(side)));
    byId("room-content").hidden = false;
  }

  showFacts(whole) {
    const { view } = this;
    const route = view.sides.flatMap((side) => side.legs).find((leg) => leg.root.name === "pd.route")?.root;
    const failed = view.sides.find((side) => side.transfer?.failure);
    const moved = view.sides.map((side) => side.transfer).find((transfer) => transfer?.bytes_done);
    const facts = [
      ["rid", view.rid && foreign(view.rid)],
      ["first token", this.firstToken === null ? "" : `after ${duration(this.firstToken)}`],
      [isOver(view) ? "took" : "so far", duration(whole)],
      ["KV", moved ? `${moved.pages_done} pages, ${bytes(moved.bytes_done)}, ${moved.chunks_done} chunks` : ""],
      ["route", route?.attributes["pd.route_reason"] ?? ""],
      ["failed", failed && foreign(`${words(failed.transfer.failure.reason)}: ${failed.transfer.failure.message}`)],
      ["trace", view.trace_id ?? ""],
    ];
    byId("room-facts").replaceChildren(...facts.filter(([, value]) => value).map(
      ([name, value]) => element("div", name, element("dt", "", name), element("dd", "", value)),
    ));
  }

  // A leg, then its stages; spans of one name are told apart by their order.
  rowsOf(side, place) {
    return side.legs.flatMap((leg, number) => [leg.root, ...leg.stages].map((span, order) => ({
      key: `${place} ${number} ${order}`,
      span,
      lane: order === 0 ? side : null,
    })));
  }

  stepsOf(side) {
    const steps = side.transfer?.timeline ?? [];
    return steps.map((step) => ({ side: side.role, state: step.state, at: step.at_ms - this.begin }));
  }

  columnsOfSpans() {
    return [
      { label: "stage", area: "stage", head: true, fill: fillStage },
      { label: "at ms", area: "at number", text: ({ span }) => ms(span.start_ms - this.begin) },
      { label: "took ms", area: "took number", text: ({ span }) => ms(this.endOf(span) - span.start_ms) },
      { label: "", area: "line", fill: (cell, { span, lane }) => this.fillLine(cell, span, lane) },
      { label: "", area: "detail", text: ({ span }) => detailOf(span) },
    ];
  }

  endOf = (span) => span.end_ms ?? this.view.now_ms;

  fillLine(cell, span, lane) {
    if (!cell.firstChild) cell.append(element("div", "track", element("span")));
    const bar = cell.firstChild.firstChild;
    const from = (span.start_ms - this.begin) / this.scale;
    const to = (this.endOf(span) - this.begin) / this.scale;
    const kind = span.failure ? "failed" : lane ? "leg" : KINDS[span.name] ?? "computing";
    bar.className = `${kind}${span.end_ms === null || to > 1 ? " goes-on" : ""}`;
    placed(bar, Math.min(from, 1), Math.min(to, 1));
    cell.firstChild.classList.toggle("beyond", from >= 1);
  }
}

function fillStage(cell, { span, lane }) {
  const name = lane ? `${lane.role} ${lane.address}` : named(span.name);
  if (cell.textContent === name) return;
  cell.parentElement.classList.toggle("lane", lane !== null);
  if (lane) cell.replaceChildren(element("span", "role", lane.role), " ", element("span", "mono", lane.address));
  else setText(cell, name);
}

function fillState(cell, step) {
  if (cell.firstChild) return;
  cell.append(element("span", `state ${step.state}`, words(step.state)));
}

// What the client waited for its first token, as the router has noted it; without a router, decode.
function firstTokenOf(view, begin) {
  const roots = view.sides.flatMap((side) => side.legs.map((leg) => leg.root));
  const first = roots.find((root) => "ttft_ms" in root.attributes);
  return first ? first.start_ms - begin + Number(first.attributes.ttft_ms) : null;
}

function isOver(view) {
  const isOpen = (side) => side.legs.some((leg) => leg.root.end_ms === null)
    || ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING"].includes(side.transfer?.state);
  return !view.sides.some(isOpen);
}

// The account in order as a bar, and summed up as a list, the largest first.
function showAccount(shares) {
  byId("account-section").hidden = shares.length === 0;
  const whole = shares.reduce((total, share) => total + share.took_ms, 0);
  const sums = new Map();
  let from = 0;
  const parts = shares.map((share) => {
    const name = share.role ? `${share.role}: ${named(share.span)}` : share.span;
    const kind = share.role ? KINDS[share.span] ?? "computing" : "unaccounted";
    sums.set(name, { kind, took: (sums.get(name)?.took ?? 0) + share.took_ms });
    const part = placed(element("span", kind), from / whole, (from + share.took_ms) / whole);
    from += share.took_ms;
    return part;
  });
  byId("account-bar").replaceChildren(...parts);
  byId("account").replaceChildren(...withoutCrumbs(sums, whole).map(([name, { kind, took }]) => element(
    "li", `key ${kind}`, `${name} `, element("strong", "", `${ms(took)} ms`), ` ${(took / whole * 100).toFixed(1)} %`,
  )));
}

// The largest first, and what is too small to be read as one.
function withoutCrumbs(sums, whole) {
  const lines = [...sums].sort(([, one], [, other]) => other.took - one.took);
  const isCrumb = ([, { kind, took }]) => took < whole * CRUMB && kind !== "unaccounted";
  const rest = lines.filter(isCrumb).reduce((total, [, { took }]) => total + took, 0);
  return [...lines.filter((line) => !isCrumb(line)), ...(rest ? [["all else", { kind: "rest", took: rest }]] : [])];
}

function placed(bar, from, to) {
  bar.style.left = `${from * 100}%`;
  bar.style.width = `${(to - from) * 100}%`;
  return bar;
}

// Attributes in words, the known ones first and in this order; null hides what is said elsewhere.
const TOLD = {
  "pd.bootstrap_room": null, "pd.route_reason": null, "error.type": null, ttft_ms: null, rid: null, chunk: null,
  prefill: null, decode: null, "pd.disaggregated": null,
  prompt_tokens: (value) => `${value} tokens of prompt`,
  tokens: (value) => counted(value, "token"),
  end: (value) => `to ${value}`,
  pages: (value) => counted(value, "page"),
  cached_tokens: (value) => `${counted(value, "token")} cached`,
  cached_pages: (value) => `${value} of them cached`,
  descriptors: (value) => counted(value, "PUT"),
  bytes: (value) => bytes(Number(value)),
  gb_per_s: (value) => `${Number(value).toFixed(2)} GB/s`,
  carrier: (value) => value,
};
const ORDER = Object.keys(TOLD);

const counted = (value, what) => `${value} ${what}${value === "1" ? "" : "s"}`;

function detailOf({ attributes, failure }) {
  const place = (name) => (name in TOLD ? ORDER.indexOf(name) : ORDER.length);
  const names = Object.keys(attributes).filter((name) => TOLD[name] !== null).sort((one, other) => (
    place(one) - place(other) || one.localeCompare(other)
  ));
  const told = names.map((name) => (name in TOLD ? TOLD[name] : plain(name))(attributes[name]));
  return [failure && words(failure), ...told].filter(Boolean).join(", ");
}

// As it is named; milliseconds with their unit behind.
function plain(name) {
  const [, label, unit] = /^(?:pd\.)?(.*?)(_ms)?$/.exec(name);
  return (value) => `${label.replaceAll("_", " ")} ${unit ? `${ms(Number(value))} ms` : value}`;
}
