# needs: weft
# The link's state is shown as it is, down and up again.
state() { with weft fi_info -p weft -d rxe0 -v | grep -io 'FI_LINK_[A-Z]*' | sort -u | tr '\n' ' '; }
run() {
	[ "$(state)" = "FI_LINK_UP " ] || { echo "up shown as $(state)"; return 1; }
	ip link set v0 down
	sleep 1
	down=$(state)
	ip link set v0 up
	rxe_wait || return 1
	[ "$down" = "FI_LINK_DOWN " ] || { echo "down shown as '$down'"; return 1; }
	[ "$(state)" = "FI_LINK_UP " ] || { echo "up again shown as $(state)"; return 1; }
}
