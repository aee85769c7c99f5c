"use strict";
// Keeps a page up to date: asks for the same page again while it is seen, and changes only what differs, so that focus,
// selection, scroll position and open details stay. Without this script the page works, and shows what it was.
(() => {
  const every = Number(document.body.dataset.every || 5) * 1000;
  const main = document.getElementById("main");
  const state = document.getElementById("state");
  let at = Date.now();
  let asking = false;

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset?.key || "" : "");

  function copyAttributes(old, next) {
    for (const { name } of [...old.attributes]) {
      // Whether details are open is the reader's own.
      if (!next.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    }
    for (const { name, value } of next.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
  }

  function morph(old, next) {
    if (old.nodeType !== 1) {
      if (old.data !== next.data) old.data = next.data;
      return;
    }
    copyAttributes(old, next);
    morphChildren(old, next);
  }

  function morphChildren(old, next) {
    const keyed = new Map();
    for (const child of old.childNodes) {
      if (keyOf(child)) keyed.set(keyOf(child), child);
    }
    let place = old.firstChild;
    for (const wanted of [...next.childNodes]) {
      const key = keyOf(wanted);
      let found = key ? keyed.get(key) : place;
      while (!key && found && keyOf(found)) found = found.nextSibling;
      if (found && found.nodeName === wanted.nodeName && found.parentNode === old) {
        // What has the focus is not moved: that would take it away.
        if (found !== place && !(place && place.contains(document.activeElement))) old.insertBefore(found, place);
        morph(found, wanted);
        place = found.nextSibling;
      } else {
        old.insertBefore(document.adoptNode(wanted), place);
      }
    }
    while (place) {
      const gone = place;
      place = place.nextSibling;
      gone.remove();
    }
  }

  function show() {
    const secs = Math.round((Date.now() - at) / 1000);
    const late = secs > (2 * every) / 1000 + 1;
    state.textContent = late ? ` · not live: ${secs} s old` : " · live";
    state.className = late ? "bad" : "";
  }

  async function refresh() {
    if (asking || document.visibilityState !== "visible") return;
    asking = true;
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const next = page.getElementById("main");
        if (next) {
          morphChildren(main, next);
          at = Date.now();
        }
      }
    } catch {
      // The next try is due soon; meanwhile the header says how old the page is.
    } finally {
      asking = false;
      show();
    }
  }

  setInterval(refresh, every);
  setInterval(show, 1000);
  document.addEventListener("visibilitychange", refresh);
  show();
})();
