/* Search in pages that were opened from a disk: browsers start no worker there, so its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      this.early = []
      inside.answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.ready = () => {
        const waiting = this.early
        this.early = null
        waiting.forEach(data => inside.postMessage(data, "*"))
      }
      this.inside = inside
      const source = String(url).replace(/"/g, "%22")
      inside.document.open()
      inside.document.write(
        '<script>window.postMessage_ = window.postMessage; self.postMessage = (data, to) => to ? postMessage_(data, to) : answer(data)</' + 'script>' +
        '<script src="' + source + '" onload="ready()"></' + 'script>'
      )
      inside.document.close()
    }

    postMessage(data) {
      if (this.early) this.early.push(data)
      else this.inside.postMessage(data, "*")
    }

    terminate() {}
  }
}
