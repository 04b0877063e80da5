# needs: weft
# A port that is down is not listed as up (libfabric's verbs provider does not list it; FI_LINK_DOWN
# would be correct too), and is listed again when the link is up.
state() { with weft fi_info -p weft -d rxe0 -v | grep -o 'state: *FI_LINK_[A-Z]*' | grep -o 'FI_LINK.*' | sort -u | tr '\n' ' '; }
run() {
	[ "$(state)" = "FI_LINK_UP " ] || { echo "up shown as $(state)"; return 1; }
	ip link set v0 down
	sleep 1
	down=$(state)
	ip link set v0 up
	rxe_wait || return 1
	[ -z "$down" ] || [ "$down" = "FI_LINK_DOWN " ] || { echo "down shown as '$down'"; return 1; }
	[ "$(state)" = "FI_LINK_UP " ] || { echo "up again shown as $(state)"; return 1; }
}
