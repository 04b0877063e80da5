# needs: weft
# A device that pins: a peer sees the pages that a region had when it was registered, whatever is mapped there by now, until the
# region is refreshed; then the new ones, by the same key.
run() {
	FI_WEFT_MR_MODE=LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY fipeer_both weft weft 10.77.0.1 refresh >/tmp/out || { cat /tmp/out; return 1; }
	cat /tmp/out
	for what in 0 1 2 3 4 5 none; do
		grep -q "^server: refused $what: -22$" /tmp/out || return 1
	done
	grep -q '^server: refused flag: -' /tmp/out && grep -q '^exchanged: o$' /tmp/out && grep -q '^refreshed: n$' /tmp/out
}
