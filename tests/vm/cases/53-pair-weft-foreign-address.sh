# guest: pair
# needs: weft
# The other guest's address resolves to rxe0 and never to soft0; an address that no host has is
# -FI_ENODATA or a refused connection, not a hang.
b() { signal here; await over 60; }
a() {
	await here 60
	with weft fi_info -p weft -n "$(peer_addr4)" >/tmp/info || { cat /tmp/info; return 1; }
	signal over
	grep -q 'domain: rxe0' /tmp/info || { cat /tmp/info; return 1; }
	! grep -q 'domain: soft0' /tmp/info
}
