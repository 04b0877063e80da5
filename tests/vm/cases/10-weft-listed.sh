# needs: weft
# fi_info lists rxe0 by its name, before soft0, with correct addresses, link state and NIC data
# (which has no bus).
run() {
	with weft fi_info -p weft >/tmp/info || { cat /tmp/info; return 1; }
	domains=$(awk '$1 == "provider:" { provider = $2 } $1 == "domain:" && provider == "weft" { print $2 }' /tmp/info | uniq | tr '\n' ' ')
	echo "domains in order: $domains"
	case $domains in rxe0*soft0*) ;; *) cat /tmp/info; return 1 ;; esac
	case $domains in *soft0*rxe0*) echo "rxe0 comes after soft0"; return 1 ;; esac
	with weft fi_info -p weft -d rxe0 -v >/tmp/verbose || return 1
	grep -q '10.77.0.1' /tmp/verbose && grep -q 'fd77::1' /tmp/verbose || { cat /tmp/verbose; return 1; }
	grep -qi 'state: *FI_LINK_UP' /tmp/verbose || { echo "link state is not up"; grep -iA 12 link_attr /tmp/verbose; return 1; }
	# the port's active MTU, not the interface's
	grep -q 'mtu: *1024' /tmp/verbose || { echo "mtu is not the port's"; grep -i mtu /tmp/verbose; return 1; }
	! with weft fi_info -p weft -d nosuch0 >/dev/null 2>&1
}
