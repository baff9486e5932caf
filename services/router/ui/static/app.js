// The status page: asks the router about once a second, and shows what it says.

import { RoomDialog } from "./room.js";
import {
  byId, bytes, clock, count, duration, element, fillBar, foreign, rate, setText, Table, words,
} from "./view.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 8000;

const columnsOfRooms = (last) => [
  { label: "room", area: "room", head: true, fill: fillRoom },
  { label: "rid", area: "rid", fill: (cell, room) => fillForeign(cell, room.rid) },
  { label: "prefill", area: "prefill", fill: (cell, room) => fillSide(cell, room.sides.prefill, "prefill") },
  { label: "decode", area: "decode", fill: (cell, room) => fillSide(cell, room.sides.decode, "decode") },
  { label: "pages", area: "pages number", text: (room) => count(most(room, "pages_done")) },
  { label: "size", area: "size number", text: (room) => bytes(most(room, "bytes_done")) },
  { label: "rate", area: "rate number", text: (room) => rate(writer(room).bytes_per_s) },
  ...last,
];

const live = new Table(
  byId("live"),
  columnsOfRooms([
    { label: "age", area: "age number", text: (room) => duration(room.until_ms - room.opened_ms) },
  ]),
  (room) => room.room,
  "No handoff is under way.",
);

const ended = new Table(
  byId("ended"),
  columnsOfRooms([
    { label: "took", area: "took number", text: (room) => duration(room.until_ms - room.opened_ms) },
    { label: "ended", area: "age number", text: (room) => `${duration(now_ms - room.until_ms)} ago` },
    { label: "why", area: "why", fill: fillFailure },
  ]),
  (room) => room.room,
  "None lately.",
);

const processes = new Table(
  byId("processes"),
  [
    { label: "process", area: "process", head: true, fill: fillProcess },
    { label: "state", area: "health", fill: fillHealth },
    { label: "rooms", area: "rooms number", text: (each) => roomsOf(each) },
    { label: "waiting", area: "waiting number", text: (each) => queueOf(each) },
    { label: "pages", area: "memory", fill: fillMemory },
    { label: "slots", area: "slots number", text: (each) => slotsOf(each) },
    { label: "up", area: "up number", text: (each) => (each.process ? duration(now_ms - each.process.started_ms) : "") },
  ],
  (each) => each.address,
  "The router does not know any process.",
);

const routes = new Table(
  byId("routes"),
  [
    { label: "route", area: "route", head: true, text: (route) => route.name },
    { label: "state", area: "health", fill: fillProof },
    { label: "carrier", area: "carrier", text: (route) => route.peer?.carrier ?? "" },
    { label: "canary", area: "canary number", text: (route) => canaryOf(route.peer) },
    { label: "took", area: "took number", text: (route) => (canaryOf(route.peer) ? duration(route.peer.canary_took_ms) : "") },
    { label: "rooms", area: "rooms number", text: (route) => (route.peer ? count(route.peer.live_rooms) : "") },
  ],
  (route) => route.name,
  "The router has no route.",
);

const quarantine = new Table(
  byId("quarantine"),
  [
    { label: "room", area: "room", head: true, fill: fillRoom },
    { label: "at", area: "process", text: (held) => held.address },
    { label: "pages", area: "pages number", text: (held) => count(held.pages) },
    { label: "for", area: "age number", text: (held) => duration(now_ms - held.since_ms) },
    { label: "waits for", area: "why", fill: (cell, held) => fillForeign(cell, held.description) },
  ],
  (held) => `${held.room} ${held.address}`,
  "None.",
);

// --- cells ---

function fillRoom(cell, { room }) {
  if (cell.firstChild) return;
  const link = element("a", "mono", room);
  link.href = `#room=${room}`;
  cell.append(link);
}

function fillForeign(cell, text) {
  if (cell.textContent === text) return;
  cell.replaceChildren(foreign(text));
  cell.title = text;
}

// Where it is, too, if it could be elsewhere.
function fillSide(cell, side, role) {
  const address = side && several.has(role) ? ` ${side.address}` : "";
  const shown = side ? words(side.state) + address : "";
  if (cell.textContent === shown) return;
  cell.replaceChildren();
  if (side) cell.append(element("span", `state ${side.state}`, words(side.state)), element("span", "address", address));
}

function fillFailure(cell, { failure }) {
  const shown = failure ? `${words(failure.reason)}: ${failure.message}` : "";
  if (cell.textContent === shown) return;
  cell.title = shown;
  cell.replaceChildren();
  if (failure) cell.append(element("span", "bad", words(failure.reason)), ": ", foreign(failure.message));
}

function fillProcess(cell, each) {
  if (cell.firstChild) return;
  cell.append(element("span", "role", each.role), " ", element("span", "mono", each.address));
}

function fillHealth(cell, { address, trouble, worker }) {
  const lost = worker && !worker.live ? worker.trouble : null;
  const why = trouble ? `does not answer: ${trouble.message.replace(`${address}: `, "")}` : lost && `lost: ${lost}`;
  fillWord(cell, "up", why || (worker?.stopping ? "stopping: gets nothing new" : null));
}

function fillProof(cell, { proven, trouble }) {
  fillWord(cell, proven === undefined ? "pairing alone" : "proven", trouble ?? null);
}

// One good word, or what is the matter.
function fillWord(cell, good, bad) {
  if (cell.textContent !== (bad ?? good)) cell.replaceChildren(element("span", bad ? "bad" : "good", foreign(bad ?? good)));
}

function fillMemory(cell, { pool }) {
  if (!pool) return cell.replaceChildren();
  const { total, used, cached, free, quarantined } = pool.pages;
  const held = quarantined ? `, ${count(quarantined)} quarantined` : "";
  const said = `${count(used)} used, ${count(cached)} cached, ${count(free)} free${held} of ${count(total)} pages`;
  if (!cell.firstChild) cell.append(element("div", "bar"), element("span", "amount"));
  fillBar(cell.firstChild, [["used", used], ["cached", cached], ["quarantined", quarantined], ["free", free]], said);
  setText(cell.lastChild, `${count(used)} used, ${count(cached)} cached${held} of ${count(total)}`);
}

const roomsOf = ({ pool, process }) => (pool ? count(pool.live_rooms) : process ? count(process.open_rooms) : "");

function queueOf({ pool, worker }) {
  if (!pool) return "";
  const most = worker?.max_queued ? ` of ${count(worker.max_queued)}` : "";
  const oldest = worker?.queued ? `, ${duration(worker.oldest_wait_ms)}` : "";
  const retracted = pool.requests_retracted ? `, ${count(pool.requests_retracted)} retracted` : "";
  return `${count(pool.requests_queued)}${most}${oldest}${retracted}`;
}

const slotsOf = ({ pool }) => (pool ? `${count(pool.slots.used)} of ${count(pool.slots.total)}` : "");

const canaryOf = (peer) => (peer && peer.canary_ms !== null ? `${duration(now_ms - peer.canary_ms)} ago` : "");

// Prefill writes the pages: it knows best how fast. Where it has forgotten the room decode says what it has heard.
const writer = (room) => room.sides.prefill ?? room.sides.decode;
const most = (room, field) => Math.max(...Object.values(room.sides).map((side) => side[field]));

// --- the whole ---

// Every route with its pairing, then pairings that belong to none, as with data-parallel ranks.
function waysOf(system) {
  const ways = system.routes.map((route) => ({
    ...route,
    name: route.prefill ? `${route.prefill} → ${route.decode}` : `${route.decode} alone`,
  }));
  const named = new Map(ways.map((way) => [way.name, way]));
  for (const decode of system.processes.filter((each) => each.role === "decode")) {
    for (const peer of decode.peers) {
      const name = `${peer.address} → ${decode.address}`;
      if (!named.has(name)) named.set(name, { name });
      named.get(name).peer = peer;
    }
  }
  return [...named.values()];
}

function showFigures(system) {
  const engines = system.processes.filter((each) => each.role !== "router");
  const proven = system.routes.filter((route) => route.proven).length;
  const sum = (field) => engines.reduce((total, each) => total + (each.pool?.[field] ?? 0), 0);
  const figures = [
    ["routes proven", `${proven} of ${system.routes.length}`, proven === 0],
    ["open requests", count(system.processes.find((each) => each.process)?.process.open_rooms ?? 0), false],
    ["waiting", count(sum("requests_queued")), false],
    ["handoffs under way", count(system.rooms_live), false],
    ["failed lately", count(system.failures.reduce((total, each) => total + each.count, 0)), system.failures.length > 0],
  ];
  const list = byId("figures");
  figures.forEach(([name, value, bad], index) => {
    if (!list.children[index]) list.append(element("div", "", element("dt", "", name), element("dd")));
    const figure = list.children[index].lastChild;
    setText(figure, value);
    figure.classList.toggle("bad", bad);
  });
}

function showFailures(failures) {
  const list = byId("failures");
  const shown = failures.map(({ reason, count: number }) => `${words(reason)} ${number}`);
  if (list.textContent === shown.join("")) return;
  list.replaceChildren(...shown.map((text) => element("li", "", text)));
}

function show(system) {
  now_ms = system.now_ms;
  const roles = system.processes.map((each) => each.role);
  several = new Set(roles.filter((role, place) => roles.indexOf(role) !== place));
  const model = system.processes.find((each) => each.process?.model)?.process;
  setText(byId("model"), model ? `${model.model}, version ${model.software_version}` : "");
  showFigures(system);
  processes.show(system.processes);
  routes.show(waysOf(system));
  const held = system.processes.flatMap(({ address, quarantine: rooms }) => rooms.map((each) => ({ ...each, address })));
  byId("quarantine-section").hidden = held.length === 0;
  quarantine.show(held);
  const shown = system.rooms_live > system.live.length ? `the ${system.live.length} oldest of ` : "";
  setText(byId("live-count"), `${shown}${count(system.rooms_live)}`);
  live.show(system.live);
  showFailures(system.failures);
  const onlyFailed = byId("only-failed").checked;
  ended.show(system.ended.filter((each) => each.failure || !onlyFailed));
}

// --- asking ---

async function ask(address) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error.message);
  return content;
}

async function refresh() {
  let system = null;
  try {
    system = await ask("api/system");
  } catch {
    const since = last ? ` since ${clock(answered)}; what is shown is as of then` : "";
    setText(byId("lost"), `The router does not answer${since}. Trying again.`);
  }
  byId("lost").hidden = system !== null;
  document.body.classList.toggle("stale", system === null);
  if (system) {
    last = system;
    answered = Date.now();
    setText(byId("asked-at"), `as of ${clock(answered)}`);
    show(system);
  }
  await dialog.refresh();
}

// Said where it is seen: a page that stands still without a word would be taken for the truth.
function defect(error) {
  console.error(error);
  setText(byId("lost"), `This page cannot show what the router said: ${error.message}`);
  byId("lost").hidden = false;
}

async function keepAsking() {
  for (;;) {
    const next = new Promise((resume) => setTimeout(resume, EVERY_MS));
    if (!document.hidden && !paused) await refresh().catch(defect);
    await next;
  }
}

let now_ms = 0;
let several = new Set();
let last = null;
let answered = 0;
let paused = false;
const dialog = new RoomDialog(ask);

byId("only-failed").addEventListener("change", () => last && show(last));
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").ariaPressed = String(paused);
});
keepAsking();
