// The search of the site without a server: a browser starts no worker for a page that was opened from a folder
// (file://), so there the script of the search runs in a hidden frame. This class has as much of Worker's interface as
// the theme uses; the theme looks for its name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title>";
      frame.addEventListener("load", () => {
        const inner = frame.contentWindow;
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inner.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.addEventListener("load", () => {
          this.postMessage = (data) => inner.dispatchEvent(new MessageEvent("message", { data }));
          this.waiting.forEach(this.postMessage);
        });
        inner.document.head.append(script);
      }, { once: true });
      document.body.append(frame);
    }

    postMessage(data) {
      this.waiting.push(data);
    }
  };
  window.Worker = window.IFrameWorker;
}
