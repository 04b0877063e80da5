# needs: weft
# A device that pins: a peer accesses the pages that a region had at registration, whatever is
# mapped at its addresses now, until the region is refreshed; then the new pages, by the same key.
run() {
	FI_WEFT_MR_MODE=LOCAL,VIRT_ADDR,PROV_KEY,MMU_NOTIFY fipeer_both weft weft 10.77.0.1 refresh >/tmp/out || { cat /tmp/out; return 1; }
	cat /tmp/out
	for what in 0 1 2 3 4 5 none; do
		grep -q "^server: refused $what: -22$" /tmp/out || return 1
	done
	grep -q '^server: refused flag: -' /tmp/out && grep -q '^exchanged: o$' /tmp/out && grep -q '^refreshed: n$' /tmp/out
}
